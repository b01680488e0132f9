/* A CUDA driver whose device memory is host memory, for tests: what cuda-python's real bindings call, and no more.
   Each call is written to stderr, so that a test sees what arrived on this side of the bindings. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SAID(...) fprintf(stderr, __VA_ARGS__)

typedef unsigned long long address;

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)0x31; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { SAID("release %d\n", device); return 0; }
int cuCtxSetCurrent(void *context) { SAID("current %p\n", context); return 0; }

int cuStreamCreate(void **stream, unsigned flags) { SAID("stream %u\n", flags); *stream = (void *)0x99; return 0; }
int cuStreamDestroy_v2(void *stream) { SAID("destroy stream %p\n", stream); return 0; }
int cuStreamSynchronize(void *stream) { SAID("synchronise %p\n", stream); return getenv("FAIL") ? 700 : 0; }

int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = 123; *total = 456; return 0; }
int cuMemAlloc_v2(address *p, size_t n) {
    if (n > 1u << 30) return 2;
    *p = (address)aligned_alloc(256, (n + 255) / 256 * 256);
    return 0;
}
int cuMemFree_v2(address p) { SAID("free\n"); free((void *)p); return 0; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) {
    SAID("host %zu %u\n", n, flags);
    *p = malloc(n);
    memset(*p, 255, n);
    return 0;
}
int cuMemFreeHost(void *p) { SAID("free host\n"); free(p); return 0; }

int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t n, void *stream) {
    SAID("upload %zu %p\n", n, stream);
    memcpy((void *)to, from, n);
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, address from, size_t n, void *stream) {
    SAID("download %zu %p\n", n, stream);
    memcpy(to, (void *)from, n);
    return 0;
}
int cuMemcpyDtoH_v2(void *to, address from, size_t n) { memcpy(to, (void *)from, n); return 0; }
int cuMemcpyDtoDAsync_v2(address to, address from, size_t n, void *stream) {
    SAID("copy %zu %p\n", n, stream);
    memcpy((void *)to, (void *)from, n);
    return 0;
}

typedef struct {
    size_t from_x, from_y; int from_type; const void *from_host; address from; void *from_array; size_t from_pitch;
    size_t to_x, to_y; int to_type; void *to_host; address to; void *to_array; size_t to_pitch;
    size_t width, height;
} pieces;
int cuMemcpy2DAsync_v2(const pieces *p, void *stream) {
    SAID("copy types %d %d at %zu %zu %zu %zu %p\n",
         p->from_type, p->to_type, p->from_x, p->from_y, p->to_x, p->to_y, stream);
    for (size_t row = 0; row < p->height; row++)
        memcpy((char *)p->to + row * p->to_pitch, (char *)p->from + row * p->from_pitch, p->width);
    return 0;
}
int cuMemsetD8Async(address p, unsigned char value, size_t n, void *stream) {
    SAID("set %zu %p\n", n, stream);
    memset((void *)p, value, n);
    return 0;
}

int cuEventCreate(void **event, unsigned flags) { SAID("event %u\n", flags); *event = (void *)0x55; return 0; }
int cuEventRecord(void *event, void *stream) { SAID("record %p %p\n", event, stream); return 0; }
int cuEventSynchronize(void *event) { SAID("wait %p\n", event); return 0; }
int cuEventDestroy_v2(void *event) { return 0; }

int cuStreamBeginCapture_v2(void *stream, int mode) { SAID("begin %p %d\n", stream, mode); return 0; }
int cuStreamEndCapture(void *stream, void **graph) { SAID("end %p\n", stream); *graph = (void *)0x77; return 0; }
int cuGraphInstantiateWithFlags(void **executable, void *graph, unsigned long long flags) {
    SAID("instantiate %p %llu\n", graph, flags);
    *executable = (void *)0x78;
    return 0;
}
int cuGraphDestroy(void *graph) { SAID("destroy graph %p\n", graph); return 0; }
int cuGraphLaunch(void *executable, void *stream) { SAID("replay %p %p\n", executable, stream); return 0; }
int cuGraphExecDestroy(void *executable) { SAID("destroy executable %p\n", executable); return 0; }

int cuGetErrorString(int code, const char **text) { *text = "an illegal memory access was encountered"; return 0; }

/* How the bindings find everything above, by names without a version. */
static void *find(const char *name) {
    char versioned[200];
    void *self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    void *found = dlsym(self, versioned);
    return found ? found : dlsym(self, name);
}
int cuGetProcAddress_v2(const char *name, void **p, int version, unsigned long long flags, int *status) {
    *p = find(name);
    if (status) *status = *p ? 0 : 1;
    return 0;
}
