/* A libnvidia-ml.so.1 without GPUs, that can misbehave.
 *
 * The file named by FAKE_NVML_CONTROL is read anew at each call; what it says holds at once.
 * A line is one of
 *     GPU FUNCTION return CODE    that call fails with an nvmlReturn_t
 *     GPU FUNCTION value NUMBER   that call tells this number
 *     GPU FUNCTION sleep MS       that call is slow
 *     GPU FUNCTION hang           that call waits until the line is gone
 *     order GPU...                the GPUs there are, in the order of NVML's list
 *     mig GPU                     it is cut in slices
 *     lost GPU                    it is lost, until the line is gone and the library opened anew
 *     masked 1                    every UUID is blacked out
 *     epoch N                     the driver was loaded again: a new nvmlInit is needed
 *     event N GPU XID             an Xid, for those who wait; N grows
 * with * for any GPU or function; of several lines the last holds. Field values are functions
 * by the name `field:ID` or `gpm:ID`, links of a function by `name:LINK`. Every call is appended
 * to the file named by FAKE_NVML_CALLS. OLD_DRIVER leaves out what drivers of 2021 did not have.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    IS_LOST = 15,
    VERSION_MISMATCH = 25,
};
enum { GPUS = 16, SLOTS = 3, LINKS = 4, ANY = -1 };

typedef int ret_t;
typedef struct { int gpu, slot; } *dev_t_;
typedef unsigned long long u64;

static struct { int gpu, slot; } devices[GPUS][SLOTS + 1]; /* slot 0 is the whole GPU */
static atomic_int initialised, epoch, hanging, lost[GPUS];
static _Thread_local char text[1 << 14];

static void read_control(void) {
    const char *path = getenv("FAKE_NVML_CONTROL");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    ssize_t length = file >= 0 ? read(file, text, sizeof text - 1) : 0;
    text[length > 0 ? length : 0] = 0;
    if (file >= 0) close(file);
}

/* The last rule for this call and action; 0 when there is none. */
static int rule(const char *function, int gpu, const char *action, double *value) {
    int found = 0;
    for (char *line = text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : line) {
        char who[16], what[80], does[16];
        double number = 0;
        if (sscanf(line, "%15s %79s %15s %lf", who, what, does, &number) < 3) continue;
        if (strcmp(who, "*") && (gpu == ANY || atoi(who) != gpu || *who < '0' || *who > '9')) continue;
        if ((strcmp(what, "*") && strcmp(what, function)) || strcmp(does, action)) continue;
        found = 1;
        if (value) *value = number;
    }
    return found;
}

static double setting(const char *name, double otherwise) {
    for (char *line = text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : line)
        if (!strncmp(line, name, strlen(name)) && line[strlen(name)] == ' ')
            return atof(line + strlen(name));
    return otherwise;
}

static int has(const char *what, int gpu) {
    char line[16];
    snprintf(line, sizeof line, "%s %d", what, gpu);
    char *found = strstr(text, line);
    return found && (found == text || found[-1] == '\n');
}

static void pause_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static ret_t step(const char *function, int gpu) {
    double number = 0;
    const char *log = getenv("FAKE_NVML_CALLS");
    if (log) {
        char line[120];
        int length = snprintf(line, sizeof line, "%s %d\n", function, gpu);
        int file = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
        if (file >= 0) {
            if (write(file, line, (size_t)length) < 0) {}
            close(file);
        }
    }
    read_control();
    if (rule(function, gpu, "hang", NULL)) {
        hanging++;
        while (rule(function, gpu, "hang", NULL)) {
            pause_ms(2);
            read_control();
        }
        hanging--;
    }
    if (rule(function, gpu, "sleep", &number)) pause_ms((long)number);
    if (rule(function, gpu, "return", &number)) return (ret_t)number;
    if (gpu >= 0 && has("lost", gpu)) lost[gpu] = 1;
    return gpu >= 0 && lost[gpu] ? IS_LOST : OK;
}

static ret_t enter(const char *function, int gpu) {
    ret_t code = step(function, gpu);
    if (code) return code;
    return initialised > 0 && epoch == (int)setting("epoch", 0) ? OK : UNINITIALIZED;
}

static double told(const char *function, int gpu, double otherwise) {
    rule(function, gpu, "value", &otherwise);
    return otherwise;
}

/* All ones where a number is too large for an integer. */
static u64 whole(double number) {
    return number >= 18446744073709551615.0 ? ~0ULL : (u64)number;
}

/* Which GPU is at a place of the list; -1 when none is. */
static int at_place(int place) {
    char *line = strstr(text, "order ");
    if (!line) return place < (int)setting("count", 8) ? place : -1;
    line += 6;
    for (int i = 0;; i++) {
        char *end;
        long gpu = strtol(line, &end, 10);
        if (end == line || gpu >= GPUS) return -1;
        if (i == place) return (int)gpu;
        line = end;
        if (*line == '\n' || !*line) return -1;
    }
}

/* As a driver's own clean-up does: waits for the lock that a hung call holds. */
__attribute__((destructor)) static void clean_up(void) {
    while (hanging) pause_ms(2);
}

#define ENTER(gpu) do { ret_t code_ = enter(__func__, gpu); if (code_) return code_; } while (0)
#define NUMBER(name, type, expression) \
    ret_t name(dev_t_ d, type *out) { \
        int gpu = d->gpu; \
        ENTER(gpu); \
        *out = (type)whole(told(__func__, gpu, expression)); \
        return OK; \
    }

/* ---- the library ------------------------------------------------------------------------ */

ret_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    ret_t code = step(__func__, ANY);
    if (code) return code;
    epoch = (int)setting("epoch", 0);
    if (!initialised++)
        for (int gpu = 0; gpu < GPUS; gpu++) lost[gpu] = 0;
    return OK;
}
ret_t nvmlShutdown(void) {
    ret_t code = step(__func__, ANY);
    if (code) return code;
    if (initialised <= 0) return UNINITIALIZED;
    initialised--;
    return OK;
}
const char *nvmlErrorString(ret_t code) {
    step(__func__, ANY);
    (void)code;
    return "an error of the fake";
}
ret_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
    ENTER(ANY);
    snprintf(out, size, "580.65.06");
    return OK;
}
ret_t nvmlSystemGetNVMLVersion(char *out, unsigned size) {
    ENTER(ANY);
    snprintf(out, size, "13.580.65.06");
    return OK;
}
ret_t nvmlSystemGetCudaDriverVersion(int *out) {
    ENTER(ANY);
    *out = 13000;
    return OK;
}
ret_t nvmlDeviceGetCount_v2(unsigned *out) {
    ENTER(ANY);
    *out = 0;
    while (*out < GPUS && at_place((int)*out) >= 0) ++*out;
    *out = (unsigned)told(__func__, ANY, *out);
    return OK;
}
ret_t nvmlDeviceGetHandleByIndex_v2(unsigned index, dev_t_ *out) {
    read_control();
    int gpu = at_place((int)index);
    ENTER(gpu);
    if (gpu < 0) return INVALID_ARGUMENT;
    for (int slot = 0; slot <= SLOTS; slot++) devices[gpu][slot].gpu = gpu, devices[gpu][slot].slot = slot;
    *out = (dev_t_)&devices[gpu][0];
    return OK;
}
ret_t nvmlDeviceGetUUID(dev_t_ d, char *out, unsigned size) {
    ENTER(d->gpu);
    if (setting("masked", 0)) {
        snprintf(out, size, "GPU-00000000-0000-0000-0000-000000000000");
        return OK;
    }
    snprintf(out, size, "%s-%08x-0000-4000-8000-00000000%04x", d->slot ? "MIG" : "GPU", 0xa0 + d->gpu, d->slot);
    return OK;
}
ret_t nvmlDeviceGetName(dev_t_ d, char *out, unsigned size) {
    ENTER(d->gpu);
    snprintf(out, size, "NVIDIA H100 80GB HBM3%s", d->slot == 1 ? " MIG 3g.40gb" : d->slot ? " MIG 4g.40gb" : "");
    return OK;
}
typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, sub_id;
    char bus_id[32];
} pci_t;
ret_t nvmlDeviceGetPciInfo_v3(dev_t_ d, pci_t *out) {
    ENTER(d->gpu);
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "00000000:%02X:00.0", 0x10 + d->gpu);
    return OK;
}

/* ---- one number each -------------------------------------------------------------------- */

NUMBER(nvmlDeviceGetPowerUsage, unsigned, 300000 + 1000 * gpu)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, 650000)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, 700000)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, u64, 5000000000.0 + gpu)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, 0)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 5)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 5)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, 2 + gpu)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, 1)
NUMBER(nvmlDeviceGetNumFans, unsigned, 2)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, 7)
NUMBER(nvmlDeviceGetSupportedEventTypes, u64, 0x1f)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, u64, 0x4)
#ifndef OLD_DRIVER
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, u64, 0x24)
#endif

ret_t nvmlDeviceGetTemperature(dev_t_ d, unsigned sensor, unsigned *out) {
    ENTER(d->gpu);
    (void)sensor;
    *out = (unsigned)told(__func__, d->gpu, 40 + d->gpu);
    return OK;
}
ret_t nvmlDeviceGetTemperatureThreshold(dev_t_ d, unsigned threshold, unsigned *out) {
    static const unsigned limits[] = {92, 89, 95, 87};
    ENTER(d->gpu);
    if (threshold > 3) return INVALID_ARGUMENT;
    *out = limits[threshold];
    return OK;
}
ret_t nvmlDeviceGetClockInfo(dev_t_ d, unsigned type, unsigned *out) {
    static const unsigned clocks[] = {1750, 1755, 2619, 1545};
    ENTER(d->gpu);
    *out = (unsigned)told(__func__, d->gpu, clocks[type]);
    return OK;
}
ret_t nvmlDeviceGetMaxClockInfo(dev_t_ d, unsigned type, unsigned *out) {
    static const unsigned clocks[] = {1980, 1980, 2619, 1600};
    ENTER(d->gpu);
    *out = clocks[type];
    return OK;
}
ret_t nvmlDeviceGetFanSpeed_v2(dev_t_ d, unsigned fan, unsigned *out) {
    ENTER(d->gpu);
    *out = (unsigned)told(__func__, d->gpu, 30 + fan);
    return OK;
}
ret_t nvmlDeviceGetPcieThroughput(dev_t_ d, unsigned counter, unsigned *out) {
    ENTER(d->gpu);
    *out = counter ? 200000 : 100000;
    return OK;
}
ret_t nvmlDeviceGetTotalEccErrors(dev_t_ d, unsigned type, unsigned counter, u64 *out) {
    ENTER(d->gpu);
    *out = (u64)told(__func__, d->gpu, 100 * (1 - type) + 10 * counter + d->gpu);
    return OK;
}
ret_t nvmlDeviceGetEccMode(dev_t_ d, unsigned *now, unsigned *pending) {
    ENTER(d->gpu);
    *now = *pending = 1;
    return OK;
}
ret_t nvmlDeviceGetUtilizationRates(dev_t_ d, unsigned out[2]) {
    ENTER(d->gpu);
    if (has("mig", d->gpu)) return NOT_SUPPORTED;
    out[0] = (unsigned)told(__func__, d->gpu, 50 + d->gpu);
    out[1] = 30;
    return OK;
}
#define ENGINE(name, percent) \
    ret_t name(dev_t_ d, unsigned *out, unsigned *period) { \
        ENTER(d->gpu); \
        *out = (unsigned)told(__func__, d->gpu, percent); \
        *period = 167000; \
        return OK; \
    }
ENGINE(nvmlDeviceGetEncoderUtilization, 1)
ENGINE(nvmlDeviceGetDecoderUtilization, 2)
#ifndef OLD_DRIVER
ENGINE(nvmlDeviceGetJpgUtilization, 3)
ENGINE(nvmlDeviceGetOfaUtilization, 4)
#endif

/* ---- structures ------------------------------------------------------------------------- */

static const u64 GIB = 1ULL << 30;

ret_t nvmlDeviceGetMemoryInfo(dev_t_ d, u64 out[3]) {
    ENTER(d->gpu);
    u64 whole = d->slot ? 40 * GIB : 80 * GIB, used = (u64)(10 + d->gpu) * GIB / (d->slot ? 2 : 1);
    out[0] = whole;
    out[1] = whole - used - GIB;
    out[2] = used + GIB;
    return OK;
}
#ifndef OLD_DRIVER
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_t;
ret_t nvmlDeviceGetMemoryInfo_v2(dev_t_ d, memory_t *out) {
    u64 old[3];
    ENTER(d->gpu);
    if (out->version != (0x02000000 | sizeof *out)) return VERSION_MISMATCH;
    ret_t code = nvmlDeviceGetMemoryInfo(d, old);
    if (code) return code;
    out->total = old[0], out->free = old[1], out->reserved = GIB, out->used = old[2] - GIB;
    return OK;
}
typedef struct { unsigned version; int margin; } margin_t;
ret_t nvmlDeviceGetMarginTemperature(dev_t_ d, margin_t *out) {
    ENTER(d->gpu);
    if (out->version != (0x01000000 | sizeof *out)) return VERSION_MISMATCH;
    out->margin = (int)told(__func__, d->gpu, 49 - d->gpu);
    return OK;
}
typedef struct { unsigned version; u64 counts[11]; unsigned exceeded; } sram_t;
ret_t nvmlDeviceGetSramEccErrorStatus(dev_t_ d, sram_t *out) {
    ENTER(d->gpu);
    if (out->version != (0x01000000 | sizeof *out)) return VERSION_MISMATCH;
    out->exceeded = (unsigned)told(__func__, d->gpu, 0);
    return OK;
}
ret_t nvmlDeviceGetRemappedRows(dev_t_ d, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed) {
    ENTER(d->gpu);
    *corrected = 3, *uncorrected = 1, *pending = 0;
    *failed = (unsigned)told(__func__, d->gpu, 0);
    return OK;
}
ret_t nvmlDeviceGetRowRemapperHistogram(dev_t_ d, unsigned out[5]) {
    ENTER(d->gpu);
    out[0] = 2558, out[1] = 2, out[2] = out[3] = out[4] = 0;
    return OK;
}
#endif

typedef struct {
    unsigned field, scope;
    long long at, latency;
    unsigned type, code;
    union { double real; unsigned u; u64 ull; long long sll; } value;
} field_t;
enum { T_DOUBLE, T_UINT, T_ULONG, T_ULL, T_SLL };

static ret_t field_value(int gpu, field_t *f) {
    char name[32];
    double number, base = 0;
    unsigned type = T_ULL;
    snprintf(name, sizeof name, "field:%u", f->field);
    if (rule(name, gpu, "return", &number)) return (ret_t)number;
    switch (f->field) {
        case 29: case 30: case 31: /* not since Ampere */
            if (!rule(name, gpu, "value", NULL)) return NOT_SUPPORTED;
            break;
        case 82: type = T_UINT, base = 50 + gpu; break;
        case 91: type = T_UINT, base = LINKS; break;
        case 185: case 186: type = T_UINT, base = 310000 + 1000 * gpu; break;
        case 230: type = T_UINT, base = 0; break;
        case 197: base = 7e9; break;
        case 198: base = 8e9; break;
        case 138: base = 1024.0 * (f->scope + 1); break;
        case 139: base = 2048.0 * (f->scope + 1); break;
        default:
            if (f->field >= 74 && f->field <= 81) base = 1e9 * f->field;
            else if (f->field >= 169 && f->field <= 183) base = f->field;
            else if (f->field >= 206 && f->field <= 221) base = f->field + f->scope;
            else return INVALID_ARGUMENT;
    }
    base = told(name, gpu, base);
    f->type = type;
    if (type == T_UINT) f->value.u = (unsigned)base;
    else f->value.ull = whole(base);
    return OK;
}
ret_t nvmlDeviceGetFieldValues(dev_t_ d, int count, field_t *values) {
    ENTER(d->gpu);
    for (int i = 0; i < count; i++) values[i].code = (unsigned)field_value(d->gpu, &values[i]);
    return OK;
}

/* ---- NVLink ----------------------------------------------------------------------------- */

ret_t nvmlDeviceGetNvLinkState(dev_t_ d, unsigned link, unsigned *out) {
    char name[64];
    ENTER(d->gpu);
    if (link >= LINKS) return INVALID_ARGUMENT;
    snprintf(name, sizeof name, "%s:%u", __func__, link);
    *out = (unsigned)told(name, d->gpu, 1);
    return OK;
}
ret_t nvmlDeviceGetNvLinkErrorCounter(dev_t_ d, unsigned link, unsigned counter, u64 *out) {
    ENTER(d->gpu);
    if (link >= LINKS) return INVALID_ARGUMENT;
    *out = (u64)told(__func__, d->gpu, 10 * counter + link);
    return OK;
}

/* ---- processes -------------------------------------------------------------------------- */

typedef struct { unsigned pid; u64 memory; unsigned instance, compute; } process_t;

static ret_t list(int gpu, const char *function, unsigned *count, process_t *out, unsigned there) {
    unsigned room = *count;
    there = (unsigned)told(function, gpu, there);
    *count = there;
    if (!there) return OK;
    if (room < there || !out) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < there; i++)
        out[i] = (process_t){i ? 4000000 + i : (unsigned)getpid(), i ? ~0ULL : 3 * GIB, ~0U, ~0U};
    return OK;
}
#define PROCESSES(name, there) \
    ret_t name(dev_t_ d, unsigned *count, process_t *out) { \
        ENTER(d->gpu); \
        return list(d->gpu, __func__, count, out, there); \
    }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, 0)
#ifndef OLD_DRIVER
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 2)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 0)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 0)
#endif

/* ---- MIG -------------------------------------------------------------------------------- */

ret_t nvmlDeviceGetMigMode(dev_t_ d, unsigned *now, unsigned *pending) {
    ENTER(d->gpu);
    *now = *pending = (unsigned)has("mig", d->gpu);
    return OK;
}
ret_t nvmlDeviceGetMigDeviceHandleByIndex(dev_t_ d, unsigned index, dev_t_ *out) {
    ENTER(d->gpu);
    if (!has("mig", d->gpu) || index >= SLOTS) return NOT_FOUND;
    *out = (dev_t_)&devices[d->gpu][index + 1];
    return OK;
}
ret_t nvmlDeviceGetGpuInstanceId(dev_t_ d, unsigned *out) {
    ENTER(d->gpu);
    *out = d->slot == 1 ? 1 : 2; /* the second has two compute instances */
    return OK;
}

/* ---- GPU performance monitoring --------------------------------------------------------- */

#ifndef OLD_DRIVER
typedef struct { int gpu, instance; } *sample_t;
ret_t nvmlGpmQueryDeviceSupport(dev_t_ d, unsigned out[2]) {
    ENTER(d->gpu);
    if (out[0] != 1) return VERSION_MISMATCH;
    out[1] = (unsigned)told(__func__, d->gpu, 1);
    return OK;
}
ret_t nvmlGpmSampleAlloc(sample_t *out) {
    ENTER(ANY);
    *out = calloc(1, sizeof **out);
    return OK;
}
ret_t nvmlGpmSampleFree(sample_t sample) {
    ENTER(ANY);
    free(sample);
    return OK;
}
ret_t nvmlGpmSampleGet(dev_t_ d, sample_t sample) {
    ENTER(d->gpu);
    sample->gpu = d->gpu, sample->instance = 0;
    return OK;
}
ret_t nvmlGpmMigSampleGet(dev_t_ d, unsigned instance, sample_t sample) {
    ENTER(d->gpu);
    sample->gpu = d->gpu, sample->instance = (int)instance;
    return OK;
}
typedef struct { unsigned id, code; double value; const char *info[3]; } metric_t;
typedef struct { unsigned version, count; sample_t before, after; metric_t metrics[]; } metrics_t;
ret_t nvmlGpmMetricsGet(metrics_t *asked) {
    ENTER(asked->after->gpu);
    if (asked->version != 1 || asked->before->gpu != asked->after->gpu) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < asked->count; i++) {
        metric_t *m = &asked->metrics[i];
        char name[32];
        double code = OK;
        snprintf(name, sizeof name, "gpm:%u", m->id);
        rule(name, asked->after->gpu, "return", &code);
        m->code = (unsigned)code;
        m->value = told("nvmlGpmMetricsGet", asked->after->gpu, m->id + 10 * asked->after->instance);
    }
    return OK;
}
#endif

/* ---- events ----------------------------------------------------------------------------- */

typedef struct { int gpu, seen; } *set_t;
typedef struct { dev_t_ device; u64 type, data; unsigned instance, compute; } event_t;

/* The first event after `seen`, or with no `xid` asked for the number of the last. */
static int next_event(int gpu, int seen, int *xid) {
    for (char *line = text; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : line) {
        int number, who, code;
        if (sscanf(line, "event %d %d %d", &number, &who, &code) != 3 || who != gpu || number <= seen) continue;
        seen = number;
        if (xid) {
            *xid = code;
            return number;
        }
    }
    return xid ? 0 : seen;
}
ret_t nvmlEventSetCreate(set_t *out) {
    ENTER(ANY);
    *out = calloc(1, sizeof **out);
    (*out)->gpu = ANY;
    return OK;
}
ret_t nvmlDeviceRegisterEvents(dev_t_ d, u64 types, set_t set) {
    ENTER(d->gpu);
    if (!(types & 8)) return NOT_SUPPORTED;
    set->gpu = d->gpu;
    set->seen = next_event(d->gpu, 0, NULL);
    return OK;
}
ret_t nvmlEventSetWait_v2(set_t set, event_t *out, unsigned timeout_ms) {
    for (unsigned waited = 0;; waited += 5) {
        int xid, number;
        if (waited) {
            pause_ms(5);
            read_control();
        } else ENTER(set->gpu);
        if ((number = next_event(set->gpu, set->seen, &xid))) {
            set->seen = number;
            *out = (event_t){(dev_t_)&devices[set->gpu][0], 8, (u64)xid, ~0U, ~0U};
            return OK;
        }
        if (waited >= timeout_ms) return TIMEOUT;
    }
}
ret_t nvmlEventSetFree(set_t set) {
    ENTER(set->gpu);
    free(set);
    return OK;
}
