/* table.c: a layout table, in the form in which lightck writes it (docs/format.md, "Layout table").
 *
 * Untrusted bytes. Nothing is taken that the reader in Python would not take; what is odd in any way is left to it, so
 * that there is one place that tells what is wrong with a table. */
#include <string.h>

#include "internal.h"

#define NAME_MAX_NBYTES 4096u
#define NDIM_MAX 64u
#define ENTRIES_MAX (1u << 20)
#define NUMBER_END (1ull << 62) /* of lengths, offsets, dimensions */
#define NUMEL_END (1ull << 56)  /* times the largest element: still a uint64 */

struct input {
    const unsigned char *at, *end;
};

struct output {
    lck_row *row;
    int64_t *dims, *dims_end;
    char *texts;
};

static bool take(struct input *in, uint64_t nbytes, const unsigned char **found)
{
    if ((uint64_t)(in->end - in->at) < nbytes)
        return false;
    *found = in->at;
    in->at += nbytes;
    return true;
}

static bool take_big_endian(struct input *in, uint64_t width, uint64_t *number)
{
    const unsigned char *bytes;
    if (!take(in, width, &bytes))
        return false;
    *number = 0;
    for (uint64_t i = 0; i < width; i++)
        *number = *number << 8 | bytes[i];
    return true;
}

static bool take_byte(struct input *in, unsigned char wanted)
{
    const unsigned char *byte;
    return take(in, 1, &byte) && *byte == wanted;
}

/* A number from 0 up to `end`, without it. */
static bool take_number(struct input *in, uint64_t end, uint64_t *number)
{
    const unsigned char *tag;
    if (!take(in, 1, &tag))
        return false;
    if (*tag < 0x80)
        *number = *tag;
    else if (*tag < 0xcc || *tag > 0xcf || !take_big_endian(in, 1ull << (*tag - 0xcc), number)) /* uint 8 to 64 */
        return false;
    return *number < end;
}

/* The length of what begins here: in the low bits of its tag, or in `width` bytes behind another tag. */
static bool take_length(struct input *in, unsigned char small, unsigned char mask, unsigned char sized, uint64_t width,
                        uint64_t *length)
{
    const unsigned char *tag;
    if (!take(in, 1, &tag))
        return false;
    if ((*tag & ~mask) == small) {
        *length = *tag & mask;
        return true;
    }
    for (; width <= 4; width *= 2, sized++) {
        if (*tag == sized)
            return take_big_endian(in, width, length);
    }
    return false;
}

static bool take_list(struct input *in, uint64_t *length) { return take_length(in, 0x90, 0x0f, 0xdc, 2, length); }

static bool take_text(struct input *in, const unsigned char **text, uint64_t *nbytes)
{
    return take_length(in, 0xa0, 0x1f, 0xd9, 1, nbytes) && take(in, *nbytes, text);
}

static bool take_key(struct input *in, const char *key)
{
    const unsigned char *text;
    uint64_t nbytes;
    return take_text(in, &text, &nbytes) && nbytes == strlen(key) && memcmp(text, key, nbytes) == 0;
}

/* A text under its key, with a zero byte behind it: there is none in it. */
static bool copy_text(struct input *in, const char *key, struct output *out)
{
    const unsigned char *text;
    uint64_t nbytes;
    if (!take_key(in, key) || !take_text(in, &text, &nbytes) || nbytes > NAME_MAX_NBYTES || memchr(text, 0, nbytes))
        return false;
    memcpy(out->texts, text, nbytes);
    out->texts[nbytes] = 0;
    out->texts += nbytes + 1;
    return true;
}

/* The other entry that holds this one's bytes: a text, or nil, which becomes an empty text. */
static bool copy_alias(struct input *in, struct output *out)
{
    struct input ahead = *in;
    out->row->aliased = !(take_key(&ahead, "alias") && take_byte(&ahead, 0xc0));
    if (!out->row->aliased) {
        *in = ahead;
        *out->texts++ = 0;
        return true;
    }
    const char *text = out->texts;
    return copy_text(in, "alias", out) && *text != 0;
}

/* A list of dimensions, into room for so many where there is any (dims). */
static bool take_dims(struct input *in, const char *key, uint64_t *ndim, int64_t *dims, uint64_t room)
{
    if (!take_key(in, key) || !take_list(in, ndim) || *ndim > NDIM_MAX || *ndim > room)
        return false;
    for (uint64_t i = 0; i < *ndim; i++) {
        uint64_t dim;
        if (!take_number(in, NUMBER_END, &dim))
            return false;
        if (dims != NULL)
            dims[i] = (int64_t)dim;
    }
    return true;
}

static bool copy_dims(struct input *in, const char *key, uint64_t *ndim, struct output *out)
{
    if (!take_dims(in, key, ndim, out->dims, (uint64_t)(out->dims_end - out->dims)))
        return false;
    out->dims += *ndim;
    return true;
}

static bool skip_dims(struct input *in, const char *key)
{
    uint64_t ndim;
    return take_dims(in, key, &ndim, NULL, NDIM_MAX);
}

static bool take_layer(struct input *in, int64_t *layer)
{
    uint64_t number;
    if (!take_key(in, "layer"))
        return false;
    *layer = -1;
    if (in->at < in->end && *in->at == 0xff)
        return take_byte(in, 0xff);
    if (!take_number(in, NUMBER_END, &number))
        return false;
    *layer = (int64_t)number;
    return true;
}

/* ---- shapes ------------------------------------------------------------------------------------------ */

/* Whether its elements, at least one, fill one run of memory: the dimensions of more than one element, by rising stride,
 * each begin where those before them end. */
static bool is_dense(const int64_t *shape, const int64_t *stride, uint64_t ndim, uint64_t numel)
{
    uint64_t filled = 1;
    for (uint64_t left = ndim; left > 0 && filled < numel; left--) {
        uint64_t next = 0;
        while (next < ndim && (shape[next] == 1 || (uint64_t)stride[next] != filled))
            next++;
        if (next == ndim)
            return false;
        filled *= (uint64_t)shape[next];
    }
    return filled == numel;
}

/* Elements of a dense tensor; `shape` and `stride` are those that were copied last. */
static bool count_elements(const struct output *out, uint64_t *numel)
{
    const int64_t *stride = out->dims - out->row->ndim, *shape = stride - out->row->ndim;
    uint64_t product = 1;
    bool is_empty = false;
    for (uint64_t i = 0; i < out->row->ndim; i++) {
        if (shape[i] == 0)
            is_empty = true;
        else if ((uint64_t)shape[i] >= NUMEL_END / product)
            return false;
        else
            product *= (uint64_t)shape[i];
    }
    *numel = is_empty ? 0 : product;
    return is_empty || is_dense(shape, stride, out->row->ndim, product);
}

/* ---- entries ----------------------------------------------------------------------------------------- */

static bool read_shape(struct input *in, struct output *out)
{
    uint64_t n_shape, n_stride;
    if (!copy_dims(in, "shape", &n_shape, out) || !copy_dims(in, "stride", &n_stride, out) || n_shape != n_stride)
        return false;
    out->row->ndim = (uint32_t)n_shape;
    return count_elements(out, &out->row->numel);
}

static bool read_entry(struct input *in, struct output *out)
{
    lck_row *row = out->row;
    return take_byte(in, 0x8e) && copy_text(in, "name", out) && copy_text(in, "role", out) &&
           copy_text(in, "dtype", out) && read_shape(in, out) && take_key(in, "nbytes") &&
           take_number(in, NUMBER_END, &row->nbytes) && copy_text(in, "device", out) && take_key(in, "offset") &&
           take_number(in, NUMBER_END, &row->offset) && take_layer(in, &row->layer) && copy_alias(in, out) &&
           skip_dims(in, "global_shape") && take_key(in, "placements") && take_byte(in, 0xc0) &&
           take_key(in, "mesh") && take_byte(in, 0xc0) && skip_dims(in, "offsets");
}

int32_t lck_table_read(const void *table, uint64_t nbytes, lck_row *rows, uint64_t *count, int64_t *dims,
                       uint64_t dims_room, char *texts, uint64_t *texts_nbytes)
{
    struct input in = {table, (const unsigned char *)table + nbytes};
    struct output out = {rows, dims, dims + dims_room, texts};
    uint64_t length;
    if (!take_byte(&in, 0x81) || !take_key(&in, "entries") || !take_list(&in, &length) || length > ENTRIES_MAX)
        return LCK_EODD;
    if (length > nbytes / LCK_ENTRY_MIN)
        return LCK_EODD;
    for (uint64_t i = 0; i < length; i++, out.row++) {
        if (!read_entry(&in, &out))
            return LCK_EODD;
    }
    if (in.at != in.end)
        return LCK_EODD;
    *count = length;
    *texts_nbytes = (uint64_t)(out.texts - texts);
    return LCK_OK;
}
