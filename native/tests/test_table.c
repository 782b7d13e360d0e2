/* lck_table_read: what it gives of a good table, and that no bytes make it read or write beyond its buffers, which are as
 * long as they have to be and no longer, so that ASan sees each byte too many.
 * Deterministic: test_table [INPUTS [SEED]]. */
#include "check.h"

enum { ROOM = 8192, DEFAULT_INPUTS = 200000, NAME_TOO_LONG = 4097, DIMS_MAX = 64 };

typedef struct {
    unsigned char bytes[ROOM];
    uint64_t nbytes;
} table;

static void put(table *to, const void *bytes, uint64_t nbytes)
{
    CHECK(to->nbytes + nbytes <= ROOM);
    memcpy(to->bytes + to->nbytes, bytes, nbytes);
    to->nbytes += nbytes;
}

static void put_number(table *to, unsigned char tag, uint64_t number, int width)
{
    put(to, &tag, tag != 0);
    for (int i = width; i-- > 0;)
        put(to, &(unsigned char){(unsigned char)(number >> 8 * i)}, 1);
}

static void put_text(table *to, const char *text)
{
    uint64_t nbytes = strlen(text);
    if (nbytes < 32)
        put_number(to, 0, 0xa0 | nbytes, 1);
    else if (nbytes < 256)
        put_number(to, 0xd9, nbytes, 1);
    else
        put_number(to, 0xda, nbytes, 2);
    put(to, text, nbytes);
}

static void put_length(table *to, uint64_t count)
{
    if (count < 16)
        put_number(to, 0, 0x90 | count, 1);
    else
        put_number(to, 0xdc, count, 2);
}

static void put_list(table *to, const char *key, const uint64_t *numbers, uint64_t count)
{
    put_text(to, key);
    put_length(to, count);
    for (uint64_t i = 0; i < count; i++) {
        if (numbers[i] < 0x80)
            put_number(to, 0, numbers[i], 1);
        else
            put_number(to, 0xcf, numbers[i], 8);
    }
}

static void put_pair(table *to, const char *key, const char *value)
{
    put_text(to, key);
    put_text(to, value);
}

static void put_nil(table *to, const char *key)
{
    put_text(to, key);
    put_number(to, 0, 0xc0, 1);
}

typedef struct {
    const char *name, *alias;
    uint64_t shape[DIMS_MAX + 1], stride[DIMS_MAX + 1], ndim, nbytes, offset;
} entry;

static void put_entry(table *to, const entry *e)
{
    static const uint64_t zeros[DIMS_MAX + 1];
    put_number(to, 0, 0x8e, 1);
    put_pair(to, "name", e->name);
    put_pair(to, "role", "param");
    put_pair(to, "dtype", "float32");
    put_list(to, "shape", e->shape, e->ndim);
    put_list(to, "stride", e->stride, e->ndim);
    put_text(to, "nbytes");
    put_number(to, 0xcd, e->nbytes, 2);
    put_pair(to, "device", "cpu");
    put_text(to, "offset");
    put_number(to, 0xce, e->offset, 4);
    put_text(to, "layer");
    put_number(to, 0, 0xff, 1);
    if (e->alias == NULL)
        put_nil(to, "alias");
    else
        put_pair(to, "alias", e->alias);
    put_list(to, "global_shape", e->shape, e->ndim);
    put_nil(to, "placements");
    put_nil(to, "mesh");
    put_list(to, "offsets", zeros, e->ndim);
}

static void begin(table *to, uint64_t count)
{
    to->nbytes = 0;
    put_number(to, 0, 0x81, 1);
    put_text(to, "entries");
    put_length(to, count);
}

typedef struct {
    uint64_t count, texts_nbytes, dims_room;
    lck_row *rows;
    int64_t *dims;
    char *texts;
} answer;

static int32_t ask(const unsigned char *bytes, uint64_t nbytes, uint64_t dims_room, answer *a)
{
    unsigned char *own = malloc(nbytes + !nbytes);
    uint64_t rows = nbytes / LCK_ENTRY_MIN;
    *a = (answer){.rows = malloc(rows * sizeof(lck_row) + !rows),
                  .dims = malloc(dims_room * sizeof(int64_t) + !dims_room),
                  .texts = malloc(nbytes + !nbytes),
                  .dims_room = dims_room};
    CHECK(own != NULL && a->rows != NULL && a->dims != NULL && a->texts != NULL);
    memcpy(own, bytes, nbytes);
    int32_t status = lck_table_read(own, nbytes, a->rows, &a->count, a->dims, dims_room, a->texts, &a->texts_nbytes);
    free(own);
    return status;
}

static void forget(answer *a)
{
    free(a->rows);
    free(a->dims);
    free(a->texts);
}

static const entry good[] = {
    {"model/weight", NULL, {2, 300, 1}, {300, 1, 7}, 3, 2400, 4096},
    {"model/scalar", NULL, {0}, {0}, 0, 4, 8192},
    {"model/head", "model/weight", {300, 2}, {1, 300}, 2, 0, 8192},
    {"model/empty", NULL, {3, 0}, {5, 5}, 2, 0, 8192},
};
enum { GOOD = sizeof(good) / sizeof(good[0]) };

static void make_good(table *to)
{
    begin(to, GOOD);
    for (int i = 0; i < GOOD; i++)
        put_entry(to, &good[i]);
}

static void a_good_table_comes_apart(void)
{
    static const char texts[] = "model/weight\0param\0float32\0cpu\0\0model/scalar\0param\0float32\0cpu\0\0"
                                "model/head\0param\0float32\0cpu\0model/weight\0model/empty\0param\0float32\0cpu\0";
    static const int64_t dims[] = {2, 300, 1, 300, 1, 7, 300, 2, 1, 300, 3, 0, 5, 5};
    static const uint64_t numels[GOOD] = {600, 1, 600, 0};
    table t;
    answer a;
    make_good(&t);
    CHECK_EQ(ask(t.bytes, t.nbytes, 14, &a), LCK_OK);
    CHECK_EQ(a.count, GOOD);
    CHECK_EQ(a.texts_nbytes, sizeof(texts));
    CHECK(memcmp(a.texts, texts, sizeof(texts)) == 0);
    CHECK(memcmp(a.dims, dims, sizeof(dims)) == 0);
    for (int i = 0; i < GOOD; i++) {
        CHECK_EQ(a.rows[i].nbytes, good[i].nbytes);
        CHECK_EQ(a.rows[i].offset, good[i].offset);
        CHECK_EQ(a.rows[i].layer, -1);
        CHECK_EQ(a.rows[i].numel, numels[i]);
        CHECK_EQ(a.rows[i].ndim, good[i].ndim);
        CHECK_EQ(a.rows[i].aliased, good[i].alias != NULL);
    }
    forget(&a);
    CHECK_EQ(ask(t.bytes, t.nbytes, 13, &a), LCK_EODD); /* one dimension more than there is room for */
    forget(&a);
}

static void every_cut_and_every_byte_more_is_odd(void)
{
    table t;
    answer a;
    make_good(&t);
    for (uint64_t nbytes = 0; nbytes < t.nbytes; nbytes++) {
        CHECK_EQ(ask(t.bytes, nbytes, 14, &a), LCK_EODD);
        forget(&a);
    }
    put_number(&t, 0, 0xc0, 1);
    CHECK_EQ(ask(t.bytes, t.nbytes, 14, &a), LCK_EODD);
    forget(&a);
}

static int32_t of_one(const entry *e)
{
    table t;
    answer a;
    begin(&t, 1);
    put_entry(&t, e);
    int32_t status = ask(t.bytes, t.nbytes, 2 * (DIMS_MAX + 1), &a);
    forget(&a);
    return status;
}

static void as_many_dimensions_as_torch_has(void)
{
    entry e = {.name = "deep", .nbytes = 4};
    for (int i = 0; i <= DIMS_MAX; i++)
        e.shape[i] = e.stride[i] = 1;
    for (e.ndim = 0; e.ndim <= DIMS_MAX; e.ndim++)
        CHECK_EQ(of_one(&e), LCK_OK);
    CHECK_EQ(of_one(&e), LCK_EODD);
}

static void many_entries_come_apart(void)
{
    enum { MANY = 20 }; /* a list that long says its length in another way */
    table t;
    answer a;
    begin(&t, MANY);
    for (int i = 0; i < MANY; i++)
        put_entry(&t, &good[0]);
    CHECK_EQ(ask(t.bytes, t.nbytes, 6 * MANY, &a), LCK_OK);
    CHECK_EQ(a.count, MANY);
    for (int i = 0; i < MANY; i++)
        CHECK_EQ(a.rows[i].numel, 600);
    forget(&a);
}

static void impossible_entries_are_odd(void)
{
    static char longest[NAME_TOO_LONG + 1];
    static const entry odd[] = {
        {longest, NULL, {2, 3}, {3, 1}, 2, 24, 0},
        {"a", "", {2, 3}, {3, 1}, 2, 0, 0},
        {"gap", NULL, {2, 3}, {4, 1}, 2, 24, 0},
        {"overlap", NULL, {2, 3}, {1, 1}, 2, 24, 0},
        {"twice", NULL, {2, 2, 2}, {1, 2, 2}, 3, 32, 0},
        {"expanded", NULL, {2, 3}, {0, 1}, 2, 24, 0},
        {"large", NULL, {1ull << 28, 1ull << 28}, {1ull << 28, 1}, 2, 24, 0},
        {"wrapped", NULL, {1ull << 32, 1ull << 32}, {1ull << 32, 1}, 2, 0, 0},
        {"empty and large", NULL, {0, 1ull << 40, 1ull << 40}, {1, 1, 1}, 3, 0, 0},
        {"a large number", NULL, {1ull << 62}, {1}, 1, 0, 0},
    };
    memset(longest, 'a', NAME_TOO_LONG);
    for (unsigned i = 0; i < sizeof(odd) / sizeof(odd[0]); i++)
        CHECK_EQ(of_one(&odd[i]), LCK_EODD);
    longest[NAME_TOO_LONG - 1] = 0;
    CHECK_EQ(of_one(&odd[0]), LCK_OK);
    CHECK_EQ(of_one(&(entry){"transposed", NULL, {2, 3, 1, 4}, {4, 8, 99, 1}, 4, 96, 0}), LCK_OK);
}

static void no_bytes_lead_out_of_the_buffers(uint64_t inputs, uint64_t seed)
{
    static const unsigned char tags[] = {0x00, 0x7f, 0x81, 0x8e, 0x90, 0x9f, 0xa0, 0xbf, 0xc0, 0xcc, 0xcd, 0xce,
                                         0xcf, 0xd9, 0xda, 0xdb, 0xdc, 0xdd, 0xde, 0xdf, 0xe0, 0xff};
    table whole;
    uint64_t taken = 0;
    make_good(&whole);
    for (uint64_t i = 0; i < inputs; i++) {
        table t = whole;
        answer a;
        for (uint64_t changes = random64(&seed) % 4; changes-- > 0;) {
            uint64_t at = random64(&seed) % t.nbytes, value = random64(&seed);
            t.bytes[at] = value % 3 ? tags[value / 3 % sizeof(tags)] : (unsigned char)(value >> 32);
        }
        if (random64(&seed) % 4 == 0)
            t.nbytes = random64(&seed) % (t.nbytes + 1);
        if (ask(t.bytes, t.nbytes, random64(&seed) % 16, &a) == LCK_OK) {
            uint64_t texts = 0;
            for (uint64_t k = 0; k < a.texts_nbytes; k++)
                texts += a.texts[k] == 0;
            CHECK_EQ(texts, 5 * a.count);
            taken++;
        }
        forget(&a);
    }
    printf("%llu of %llu taken\n", (unsigned long long)taken, (unsigned long long)inputs);
    CHECK(taken > 0 && taken < inputs);
}

int main(int argc, char **argv)
{
    uint64_t inputs = argc > 1 ? strtoull(argv[1], NULL, 0) : DEFAULT_INPUTS;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 0) : 1;
    a_good_table_comes_apart();
    as_many_dimensions_as_torch_has();
    many_entries_come_apart();
    every_cut_and_every_byte_more_is_odd();
    impossible_entries_are_odd();
    no_bytes_lead_out_of_the_buffers(inputs, seed);
    return 0;
}
