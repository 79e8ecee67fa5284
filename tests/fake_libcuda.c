// A stand-in for libcuda.so.1: keeps the rules that matter to a launcher, and writes down every call as a line of text.
//
// An image is "FAKE:8,4,128": the sizes of the kernel's parameters, which a real driver finds in the cubin.
// Rules: the current context and the capture mode belong to the thread; a launch without a current context is error
// 201, with the context of another device 400; more shared memory than asked for is 1; a misplaced parameter 716; a
// module load during a capture 900 unless the thread's capture mode is relaxed; everything is 3 in a forked child.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_PARAMS 256
#define DEVICES 8
enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
       INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, MISALIGNED = 716, CAPTURE_UNSUPPORTED = 900 };

typedef struct { int device; } Context;
typedef struct { Context *context; int count; unsigned sizes[MAX_PARAMS]; char name[128]; int shared; } Module;
typedef struct { uint32_t id; char pad[4]; uint32_t value[16]; } Attribute;
typedef struct { unsigned grid[3], block[3], shared; void *stream; Attribute *attributes; unsigned count; } Config;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *text;
static size_t used, room;
static long devices = 2, version = 13000, shared_limit = 232448, capturing, recording = 1;
static long capability[DEVICES] = {90, 90, 90, 90, 90, 90, 90, 90};
static struct { char function[64]; int code, times; } failures[16];
static Context contexts[DEVICES];
static pid_t owner;
static __thread Context *current;
static __thread int mode;

static void note(const char *format, ...) {
    if (!recording) return;
    char line[32768];
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    if (n > (int)sizeof line - 2) n = sizeof line - 2;
    line[n++] = '\n';
    pthread_mutex_lock(&lock);
    if (used + n + 1 > room) text = realloc(text, room = 2 * (used + n + 1));
    memcpy(text + used, line, n);
    used += n;
    text[used] = 0;
    pthread_mutex_unlock(&lock);
}

static int failing(const char *function) {
    int code = owner && owner != getpid() ? NOT_INITIALIZED : 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 16 && !code; i++)
        if (failures[i].times && !strcmp(failures[i].function, function)) {
            failures[i].times--;
            code = failures[i].code;
        }
    pthread_mutex_unlock(&lock);
    return code;
}

#define BEGIN                                                                        \
    int bad = failing(__func__);                                                     \
    if (bad) {                                                                       \
        note("%s failed=%d", __func__, bad);                                         \
        return bad;                                                                  \
    }
#define PLACE current ? current->device : -1, mode
#define WHERE "device=%d mode=%d"

// What a test sets and reads.
void stub_set(const char *name, int index, long value) {
    if (!strcmp(name, "devices")) devices = value;
    if (!strcmp(name, "version")) version = value;
    if (!strcmp(name, "shared_limit")) shared_limit = value;
    if (!strcmp(name, "capturing")) capturing = value;
    if (!strcmp(name, "recording")) recording = value;
    if (!strcmp(name, "capability")) capability[index] = value;
}
void stub_fail(const char *function, int code, int times) {
    for (int i = 0; i < 16; i++)
        if (!failures[i].times) {
            snprintf(failures[i].function, sizeof failures[i].function, "%s", function);
            failures[i].code = code;
            failures[i].times = times;
            return;
        }
}
const char *stub_log(void) { return text ? text : ""; }

int cuInit(unsigned flags) {
    BEGIN
    owner = getpid();
    note("cuInit");
    return 0;
}
int cuDriverGetVersion(int *out) { *out = version; return 0; }
int cuDeviceGetCount(int *out) { BEGIN *out = devices; return 0; }
int cuDeviceGet(int *out, int ordinal) {
    BEGIN
    if (!devices) return NO_DEVICE;
    if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE;
    *out = ordinal;
    return 0;
}
int cuDeviceGetName(char *out, int size, int device) { snprintf(out, size, "Stand-in %d", device); return 0; }
int cuDeviceGetAttribute(int *out, int which, int device) {
    BEGIN
    *out = which == 75 ? capability[device] / 10 : which == 76 ? capability[device] % 10 : which == 97 ? shared_limit : 0;
    return 0;
}
int cuDevicePrimaryCtxRetain(Context **out, int device) {
    BEGIN
    contexts[device].device = device;
    *out = &contexts[device];
    note("cuDevicePrimaryCtxRetain of=%d " WHERE, device, PLACE);
    return 0;
}
int cuCtxGetCurrent(Context **out) { BEGIN *out = current; return 0; }
int cuCtxSetCurrent(Context *context) {
    BEGIN
    current = context;
    note("cuCtxSetCurrent " WHERE, PLACE);
    return 0;
}
int cuThreadExchangeStreamCaptureMode(int *exchanged) {
    BEGIN
    int before = mode;
    mode = *exchanged;
    *exchanged = before;
    note("cuThreadExchangeStreamCaptureMode " WHERE, PLACE);
    return 0;
}
int cuModuleLoadData(Module **out, const char *image) {
    BEGIN
    note("cuModuleLoadData " WHERE, PLACE);
    if (!current) return INVALID_CONTEXT;
    if (capturing && mode != 2) return CAPTURE_UNSUPPORTED;
    Module *module = calloc(1, sizeof *module);
    module->context = current;
    if (!strncmp(image, "FAKE:", 5)) {
        char *rest = (char *)image + 5;
        while (*rest) {
            module->sizes[module->count++] = strtoul(rest, &rest, 10);
            if (*rest == ',') rest++;
        }
    } else if (memcmp(image, "\177ELF", 4)) {
        return INVALID_IMAGE;
    }
    *out = module;
    return 0;
}
int cuModuleGetFunction(Module **out, Module *module, const char *name) {
    BEGIN
    note("cuModuleGetFunction name=%s " WHERE, name, PLACE);
    if (!strcmp(name, "missing")) return NOT_FOUND;
    snprintf(module->name, sizeof module->name, "%s", name);
    *out = module;
    return 0;
}
int cuFuncSetAttribute(Module *function, int which, int value) {
    BEGIN
    note("cuFuncSetAttribute which=%d value=%d " WHERE, which, value, PLACE);
    if (which == 8) function->shared = value;
    return 0;
}
int cuFuncLoad(Module *function) {
    BEGIN
    note("cuFuncLoad " WHERE, PLACE);
    return 0;
}
int cuLaunchKernelEx(const Config *config, Module *function, void **params, void **extra) {
    BEGIN
    if (!current) return INVALID_CONTEXT;
    if (current != function->context) return INVALID_HANDLE;
    if (!config->grid[0] || (config->shared > 49152 && config->shared > (unsigned)function->shared)) return INVALID_VALUE;
    char shown[24576] = "", attributes[512] = "";
    size_t at = 0, filled = 0;
    for (int i = 0; i < function->count; i++) {
        unsigned size = function->sizes[i], step = size < 64 ? size : 64;
        if ((uintptr_t)params[i] % step) return MISALIGNED;
        if (i) shown[at++] = ',';
        for (unsigned j = 0; j < size && recording; j++) at += sprintf(shown + at, "%02x", ((unsigned char *)params[i])[j]);
    }
    for (unsigned i = 0; i < config->count; i++) {
        const Attribute *a = &config->attributes[i];
        filled += sprintf(attributes + filled, "%s%u:%u:%u:%u", i ? "," : "", a->id, a->value[0], a->value[1], a->value[2]);
    }
    note("cuLaunchKernelEx name=%s grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%zu attributes=%s params=%s " WHERE,
         function->name, config->grid[0], config->grid[1], config->grid[2], config->block[0], config->block[1],
         config->block[2], config->shared, (size_t)config->stream, attributes, shown, PLACE);
    return 0;
}
int cuTensorMapEncodeTiled(uint64_t *map, int dtype, unsigned rank, uint64_t address, const uint64_t *shape,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, int interleave,
                           int swizzle, int promotion, int fill) {
    BEGIN
    note("cuTensorMapEncodeTiled address=%lu " WHERE, address, PLACE);
    if (!current) return INVALID_CONTEXT;
    if ((uintptr_t)map % 64) return INVALID_VALUE;
    uint64_t words[16] = {address, ~0ull, dtype, rank, interleave, swizzle, promotion, fill};
    for (unsigned i = 0; i < rank; i++) words[8 + i % 3] = words[8 + i % 3] * 31 + shape[i];
    for (unsigned i = 0; i + 1 < rank; i++) words[11] = words[11] * 31 + strides[i];
    for (unsigned i = 0; i < rank; i++) words[12] = words[12] * 31 + box[i], words[13] = words[13] * 31 + steps[i];
    memcpy(map, words, sizeof words);
    return 0;
}
static const struct { int code; const char *name, *text; } errors[] = {
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {200, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {209, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {218, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {400, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {500, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {716, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "operation failed due to a previous error during capture"},
};
static int described(int code, const char **out, int text_wanted) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *out = text_wanted ? errors[i].text : errors[i].name;
            return 0;
        }
    *out = 0;
    return INVALID_VALUE;
}
int cuGetErrorName(int code, const char **out) { return described(code, out, 0); }
int cuGetErrorString(int code, const char **out) { return described(code, out, 1); }
