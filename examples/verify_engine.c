/* A verifier in C behind JSON lines (docs/wire.md): the greedy acceptance rule, nothing else.

   cc -O2 -o verify_engine examples/verify_engine.c
   specbench check 'cmd: ./verify_engine'

   `verify` is the engine; the rest reads JSON into values and answers. Put your verifier in its place. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NUMBER, STRING, LIST, OBJECT, WORD };

/* One JSON value. text: of a string or word. item, key: the values of a list or object, and their names. */
typedef struct Value {
    int kind;
    double number;
    char *text;
    struct Value **item;
    char **key;
    int length;
} Value;

static const char *at; /* where reading goes on */

static void refuse(const char *why) {
    fprintf(stderr, "verify_engine: %s at: %.40s\n", why, at);
    exit(2);
}

static void skip_space(void) {
    while (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n') at++;
}

static void *room(size_t size) {
    void *place = calloc(1, size);
    if (place == NULL) refuse("out of memory");
    return place;
}

/* Escapes are kept as they are: no name or number of the schema has one. */
static char *read_string(void) {
    const char *start = ++at;
    while (*at != '"') {
        if (*at == '\0') refuse("a string does not end");
        at += (*at == '\\' && at[1] != '\0') ? 2 : 1;
    }
    char *text = room(at - start + 1);
    memcpy(text, start, at - start);
    at++;
    return text;
}

static Value *read_value(void) {
    Value *value = room(sizeof *value);
    skip_space();
    if (*at == '"') {
        value->kind = STRING;
        value->text = read_string();
    } else if (*at == '[' || *at == '{') {
        char close = *at == '[' ? ']' : '}';
        int capacity = 0;
        value->kind = *at++ == '[' ? LIST : OBJECT;
        for (skip_space(); *at != close; skip_space()) {
            if (value->length == capacity) {
                capacity = capacity ? 2 * capacity : 16;
                value->item = realloc(value->item, capacity * sizeof *value->item);
                value->key = realloc(value->key, capacity * sizeof *value->key);
                if (value->item == NULL || value->key == NULL) refuse("out of memory");
            }
            if (value->kind == OBJECT) {
                if (*at != '"') refuse("a name is missing");
                value->key[value->length] = read_string();
                skip_space();
                if (*at++ != ':') refuse("a colon is missing");
            }
            value->item[value->length++] = read_value();
            skip_space();
            if (*at == ',') at++;
            else if (*at != close) refuse("a comma is missing");
        }
        at++;
    } else {
        char *end;
        value->number = strtod(at, &end);
        if (end != at) {
            value->kind = NUMBER;
            at = end;
        } else {
            const char *start = at;
            while (*at >= 'a' && *at <= 'z') at++;
            if (at == start) refuse("no JSON value");
            value->kind = WORD; /* true, false, null */
        }
    }
    return value;
}

static void release(Value *value) {
    for (int i = 0; i < value->length; i++) {
        release(value->item[i]);
        if (value->kind == OBJECT) free(value->key[i]);
    }
    free(value->item);
    free(value->key);
    free(value->text);
    free(value);
}

static Value *member(Value *object, const char *name) {
    for (int i = 0; object->kind == OBJECT && i < object->length; i++)
        if (strcmp(object->key[i], name) == 0) return object->item[i];
    fprintf(stderr, "verify_engine: the request has no %s\n", name);
    exit(2);
}

/* A number, or one of the three that JSON writes as strings. */
static double as_number(const Value *value) {
    if (value->kind == NUMBER) return value->number;
    if (value->kind != STRING) refuse("a number is missing");
    if (strcmp(value->text, "inf") == 0) return INFINITY;
    return strcmp(value->text, "-inf") == 0 ? -INFINITY : NAN;
}

/* The lowest token among the largest of a row. */
static int argmax(const Value *row) {
    int best = 0;
    for (int token = 1; token < row->length; token++)
        if (as_number(row->item[token]) > as_number(row->item[best])) best = token;
    return best;
}

/* Follows the target's argmax down the tree. Row i of target_logits follows node i, so it judges the children of i.
   Duplicate siblings spell the same text: the walk goes on below all of them (`reached`), to the deepest one. */
static void verify(Value *params, double id) {
    const Value *tokens = member(member(params, "tree"), "tokens");
    const Value *parents = member(member(params, "tree"), "parents");
    const Value *logits = member(params, "target_logits");
    int num_nodes = tokens->length, last = 0;
    int *depth = room(num_nodes * sizeof *depth), *path = room(num_nodes * sizeof *path);
    char *reached = room(num_nodes);
    reached[0] = 1;
    for (int node = 1; node < num_nodes; node++) {
        int parent = (int)parents->item[node]->number;
        int judge = parent;
        depth[node] = depth[parent] + 1;
        reached[node] = reached[parent] && (int)tokens->item[node]->number == argmax(logits->item[judge]);
        if (reached[node] && depth[node] > depth[last]) last = node;
    }
    for (int node = last; node != 0; node = (int)parents->item[node]->number) path[depth[node] - 1] = node;
    printf("{\"specbench\": 1, \"id\": %.0f, \"result\": {\"path\": [", id);
    for (int i = 0; i < depth[last]; i++) printf(i ? ", %d" : "%d", path[i]);
    printf("], \"bonus_token\": %d}}\n", argmax(logits->item[last]));
    free(depth);
    free(path);
    free(reached);
}

int main(void) {
    char *line = NULL;
    size_t capacity = 0;
    while (getline(&line, &capacity, stdin) > 0) {
        at = line;
        Value *request = read_value();
        const char *method = member(request, "method")->text;
        double id = member(request, "id")->number;
        if (method == NULL) refuse("the method is no string");
        if (strcmp(method, "hello") == 0) {
            printf("{\"specbench\": 1, \"id\": %.0f, \"result\": {\"methods\": [\"verify\"], \"vocab_size\": 32}}\n", id);
        } else if (strcmp(method, "verify") == 0) {
            verify(member(request, "params"), id);
        } else if (strcmp(method, "shutdown") == 0) {
            printf("{\"specbench\": 1, \"id\": %.0f, \"result\": null}\n", id);
            break;
        } else {
            printf("{\"specbench\": 1, \"id\": %.0f, \"error\": {\"type\": \"ValueError\", "
                   "\"message\": \"unknown method\"}}\n", id);
        }
        fflush(stdout);
        release(request);
    }
    free(line);
    return 0;
}
