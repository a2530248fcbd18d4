/* A pretended Ascend NPU: as many devices as NPU_STUB_DEVICES says, host memory for device memory, and no arithmetic.
 *
 * Enough for torch_npu to start, place tensors and copy them. Every other function of CANN is generated beside this file
 * and returns 0, so a kernel that is launched here leaves its output as it was: never trust a number computed on it.
 */

#include <stdlib.h>
#include <string.h>

enum {
    OK = 0,
    NO_DEVICE = 107001,
    NO_CONTEXT = 107002,
    NO_MEMORY = 207001,
    NOT_INITIALISED = 507008,
    BAD_DEVICE = 507033,
    ALIGNMENT = 512,
    HANDLE_BYTES = 64,
    MEMORY_BYTES_LOG2 = 33
};

static int current_device = -1;

static int device_count(void)
{
    const char *given = getenv("NPU_STUB_DEVICES");
    return given ? atoi(given) : 0;
}

static int allocate(void **block, size_t size)
{
    *block = aligned_alloc(ALIGNMENT, (size / ALIGNMENT + 2) * ALIGNMENT);
    return *block ? OK : NO_MEMORY;
}

static int handle(void **made)
{
    *made = calloc(1, HANDLE_BYTES);
    return *made ? OK : NO_MEMORY;
}

/* --- devices */

int aclInit(const char *config) { return device_count() ? OK : NOT_INITIALISED; }
const char *aclGetRecentErrMsg(void) { return "a stand-in for CANN, without a device"; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }

int aclrtGetDeviceCount(unsigned *count)
{
    *count = (unsigned)device_count();
    return *count ? OK : NO_DEVICE;
}

int aclrtGetDevice(int *device)
{
    if (current_device < 0)
        return NO_CONTEXT;
    *device = current_device;
    return OK;
}

int aclrtSetDevice(int device)
{
    if (device < 0 || device >= device_count())
        return BAD_DEVICE;
    current_device = device;
    return OK;
}

int aclrtGetCurrentContext(void **context)
{
    static int only;
    *context = &only;
    return device_count() ? OK : NO_CONTEXT;
}

int aclrtGetRunMode(int *mode)
{
    *mode = 1; /* the program runs on the host */
    return OK;
}

/* --- memory */

int aclrtMalloc(void **block, size_t size, int policy) { return allocate(block, size); }
int aclrtMallocAlign32(void **block, size_t size, int policy) { return allocate(block, size); }
int aclrtMallocWithCfg(void **block, size_t size, int policy, void *config) { return allocate(block, size); }
int aclrtMallocHost(void **block, size_t size) { return allocate(block, size); }

int aclrtFree(void *block)
{
    free(block);
    return OK;
}

int aclrtFreeHost(void *block) { return aclrtFree(block); }

int aclrtMemcpy(void *to, size_t room, const void *from, size_t size, int kind)
{
    memmove(to, from, size < room ? size : room);
    return OK;
}

int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, int kind, void *stream)
{
    return aclrtMemcpy(to, room, from, size, kind);
}

int aclrtMemset(void *to, size_t room, int value, size_t size)
{
    memset(to, value, size < room ? size : room);
    return OK;
}

int aclrtGetMemInfo(int kind, size_t *available, size_t *total)
{
    *available = *total = (size_t)1 << MEMORY_BYTES_LOG2;
    return OK;
}

int aclrtPointerGetAttributes(const void *pointer, void *attributes)
{
    memset(attributes, 0, 2 * sizeof(long));
    return OK;
}

/* --- streams, events and options */

int aclrtCreateStream(void **stream) { return handle(stream); }
int aclrtCreateStreamWithConfig(void **stream, unsigned priority, unsigned flags) { return handle(stream); }
int aclrtCreateEventExWithFlag(void **event, unsigned flags) { return handle(event); }

size_t aclGetCompileoptSize(int option) { return 2; }

int aclGetCompileopt(int option, char *value, size_t size)
{
    memset(value, 0, size);
    if (size > 1)
        value[0] = '0';
    return OK;
}
