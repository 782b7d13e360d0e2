/* lck_read_verified with random extents, offsets, lengths, blocks and checksums, compared with a reference that reads
 * byte by byte in 128-bit arithmetic. No buffer is longer than needed, so that ASan detects each access beyond its end.
 * Usage: test_read_fuzz [INPUTS [SEED]]. The same arguments give the same inputs. */
#include "check.h"

enum { FILE_NBYTES = 600, EXTENTS_MAX = 5, DEFAULT_INPUTS = 100000, BLOCK_MAX = 1 << 20 };

typedef unsigned __int128 wide;

static const uint64_t edges[] = {0, 1, 2, 63, 255, 256, 599, 600, 601, 4096, BLOCK_MAX, BLOCK_MAX + 1,
                                 UINT32_MAX, (uint64_t)INT64_MAX - 1, INT64_MAX, (uint64_t)INT64_MAX + 1, UINT64_MAX - 1,
                                 UINT64_MAX};
static unsigned char content[FILE_NBYTES];

typedef struct {
    lck_extent *extents;
    uint64_t count, off, nbytes, block, bad_block;
    int has_bad, has_dst;
} input;

typedef struct {
    int32_t status;
    uint64_t bad;      /* number of the first block that is short or does not match; of the last block if all match */
    uint64_t verified; /* bytes of the blocks that match */
    uint64_t refused;  /* bytes of the first block that does not match */
    unsigned char bytes[EXTENTS_MAX * FILE_NBYTES];
} answer;

static uint64_t below(uint64_t *state, uint64_t n)
{
    return random64(state) % n;
}

/* A random number below `usual`, or in one of 60 cases a number of `edges`. */
static uint64_t number(uint64_t *state, uint64_t usual)
{
    if (below(state, 60) == 0)
        return edges[below(state, sizeof(edges) / sizeof(edges[0]))];
    return below(state, usual);
}

static input draw(uint64_t *state)
{
    static const uint64_t blocks[] = {1, 7, 16, 64, 64, 100, 256, 256, 600, 4096, BLOCK_MAX};
    input in = {0};
    in.count = below(state, 40) == 0 ? 0 : 1 + below(state, EXTENTS_MAX);
    in.extents = malloc(in.count * sizeof(lck_extent) + 1);
    CHECK(in.extents != NULL);
    for (uint64_t i = 0; i < in.count; i++) {
        in.extents[i].off = number(state, FILE_NBYTES);
        in.extents[i].nbytes = 1 + number(state, FILE_NBYTES / 3);
    }
    in.off = number(state, FILE_NBYTES / 2);
    in.nbytes = number(state, FILE_NBYTES);
    in.block = below(state, 50) == 0 ? number(state, 3) : blocks[below(state, sizeof(blocks) / sizeof(blocks[0]))];
    in.has_bad = below(state, 3) == 0;
    in.bad_block = below(state, 4);
    in.has_dst = below(state, 4) != 0;
    return in;
}

static int is_valid(const input *in)
{
    wide total = 0;
    for (uint64_t i = 0; i < in->count; i++) {
        if (in->extents[i].nbytes == 0 || (wide)in->extents[i].off + in->extents[i].nbytes > INT64_MAX)
            return 0;
        total += in->extents[i].nbytes;
    }
    return in->count > 0 && total <= INT64_MAX && in->block >= 1 && in->block <= BLOCK_MAX &&
           (wide)in->off + in->nbytes <= INT64_MAX;
}

/* The byte at this offset of the pool, or -1 beyond the end of the pool or the file. */
static int byte_at(const input *in, uint64_t off)
{
    for (uint64_t i = 0; i < in->count; i++) {
        if (off < in->extents[i].nbytes) {
            wide at = (wide)in->extents[i].off + off;
            return at < FILE_NBYTES ? content[(size_t)at] : -1;
        }
        off -= in->extents[i].nbytes;
    }
    return -1;
}

static void expect(const input *in, answer *out)
{
    out->status = is_valid(in) ? LCK_OK : LCK_EINVAL;
    out->verified = out->bad = out->refused = 0;
    uint64_t at = 0;
    for (uint64_t index = 0; out->status == LCK_OK && at < in->nbytes; index++) {
        uint64_t n = in->nbytes - at < in->block ? in->nbytes - at : in->block;
        for (uint64_t i = 0; i < n && out->status == LCK_OK; i++) {
            int byte = byte_at(in, in->off + at + i);
            if (byte < 0)
                out->status = LCK_ESHORT;
            else
                out->bytes[at + i] = (unsigned char)byte;
        }
        if (out->status == LCK_OK && in->has_bad && index == in->bad_block)
            out->status = LCK_ECHECKSUM;
        if (out->status == LCK_ECHECKSUM)
            memset(out->bytes + at, LCK_REFUSED, out->refused = n);
        out->bad = index;
        at += n;
        if (out->status == LCK_OK)
            out->verified = at;
    }
}

static uint32_t checksum(const input *in, uint64_t at, uint64_t n)
{
    unsigned char bytes[EXTENTS_MAX * FILE_NBYTES];
    for (uint64_t i = 0; i < n; i++)
        bytes[i] = (unsigned char)byte_at(in, in->off + at + i);
    return lck_crc32c(bytes, n);
}

static void play(uint64_t *state, int fd)
{
    static answer wanted;
    input in = draw(state);
    expect(&in, &wanted);
    uint64_t uuid = random64(state), tensor = random64(state), generation = random64(state), bad = 12345;
    int is_read = in.nbytes > 0 && wanted.status != LCK_EINVAL;
    uint64_t blocks = is_read ? wanted.bad + (wanted.status != LCK_ESHORT) : 0;
    uint32_t *crcs = malloc(blocks * sizeof(uint32_t) + (blocks == 0));
    uint64_t filled = wanted.verified + wanted.refused;
    unsigned char *dst = malloc(filled + (filled == 0));
    CHECK(crcs != NULL && dst != NULL);
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t at = i * in.block, n = in.nbytes - at < in.block ? in.nbytes - at : in.block;
        crcs[i] = checksum(&in, at, n) ^ lck_block_seed(uuid, ~uuid, tensor, generation, i);
        if (in.has_bad && i == in.bad_block)
            crcs[i] ^= 1u << below(state, 32);
    }
    int32_t status = lck_read_verified(fd, in.extents, in.count, in.off, in.has_dst ? dst : NULL, in.nbytes, in.block,
                                       crcs, uuid, ~uuid, tensor, generation, &bad);
    CHECK_EQ(status, wanted.status);
    CHECK_EQ(bad, status == LCK_ESHORT || status == LCK_ECHECKSUM ? wanted.bad : 12345);
    if (in.has_dst)
        CHECK(memcmp(dst, wanted.bytes, filled) == 0);
    free(in.extents);
    free(crcs);
    free(dst);
}

int main(int argc, char **argv)
{
    uint64_t inputs = argc > 1 ? strtoull(argv[1], NULL, 10) : DEFAULT_INPUTS;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 4;
    fill_random(content, FILE_NBYTES, 1);
    int fd = open_memory(FILE_NBYTES);
    CHECK_EQ(pwrite(fd, content, FILE_NBYTES, 0), FILE_NBYTES);
    for (uint64_t i = 0; i < inputs; i++) {
        uint64_t state = seed << 40 ^ i;
        play(&state, fd);
    }
    printf("%llu inputs, seed %llu\n", (unsigned long long)inputs, (unsigned long long)seed);
    close(fd);
    return 0;
}
