# Sourced by every job in the guest: which pmem device is whose, and file systems on them.

# The block device of a provider of the NVDIMM bus.
device() {
    for link in /sys/block/pmem*; do
        real=$(readlink -f "$link")
        if [ "$(cat "${real%%/region*}/provider")" = "$1" ]; then basename "$link"; fi
    done
}

# A namespace with page structures, which DAX needs on an NVDIMM that comes without labels. It stays over a boot.
make_fsdax() {
    namespace=$(basename "$(dirname "$(dirname "$(readlink -f "/sys/block/$(device ACPI.NFIT)")")")")
    ndctl create-namespace -f -e "$namespace" -m fsdax >/out/ndctl.json
}

# The same namespace without a block device: it can only be mapped. It stays over a boot.
make_devdax() {
    namespace=$(basename "$(dirname "$(dirname "$(readlink -f "/sys/block/$(device ACPI.NFIT)")")")")
    ndctl create-namespace -f -e "$namespace" -m devdax >/out/ndctl.json
}

# make_and_mount PROVIDER FOLDER: a new ext4 with DAX.
make_and_mount() {
    mkdir -p "$2"
    mkfs.ext4 -q -F -b 4096 "/dev/$(device "$1")"
    mount -o dax=always "/dev/$(device "$1")" "$2"
}
