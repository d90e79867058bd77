/* A wire between two network namespaces, with a rate and a delay, for kernels without netem.
 *
 * usage: wire NAMESPACE_A ADDRESS_A NAMESPACE_B ADDRESS_B MBIT_PER_SECOND DELAY_US QUEUE_BYTES
 *
 * Makes a TAP device "wire0" in each namespace (by the names of "ip netns"), with an address such as 10.78.0.1/24, and
 * carries frames from one to the other. Each way has a queue of its own: a frame takes its turn at the given rate, and
 * arrives DELAY_US after its last bit was sent; what comes to a full queue is dropped, as a router does it. Prints "up"
 * when both devices are there, and ends on SIGTERM, when the devices vanish with it.
 *
 * Frames are passed as the kernel hands them over, up to 64 KiB (a virtio header says how they are to be cut), so a
 * Gbit/s costs a few percent of a core. Their time on the wire is that of the packets of 1500 bytes they stand for.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define VIRTIO_HEADER 12
#define LARGEST 66000
#define SLOTS 4096
#define PACKET 1500
/* Preamble, checksum and gap of Ethernet, which take time on a wire for every packet. */
#define PACKET_OVERHEAD 24
/* Frames that are taken from a device before the other's turn comes. */
#define BURST 16

struct frame {
    int size;
    int64_t due;
    unsigned char *data;
};

struct way {
    int from, to;
    struct frame queue[SLOTS];
    int head, count;
    int64_t free_at, queued;
};

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Make the device in a namespace, and stay there: a device belongs to the namespace that its maker is in. */
static int open_device(const char *namespace, const char *address) {
    char text[256];
    snprintf(text, sizeof text, "/run/netns/%s", namespace);
    int entered = open(text, O_RDONLY | O_CLOEXEC);
    if (entered < 0 || setns(entered, CLONE_NEWNET)) fail(text);
    close(entered);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (device < 0) fail("/dev/net/tun");
    struct ifreq request = {0};
    request.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR;
    strcpy(request.ifr_name, "wire0");
    int header = VIRTIO_HEADER;
    if (ioctl(device, TUNSETIFF, &request)) fail("TUNSETIFF");
    if (ioctl(device, TUNSETVNETHDRSZ, &header)) fail("TUNSETVNETHDRSZ");
    if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) fail("TUNSETOFFLOAD");
    snprintf(text, sizeof text,
             "ip addr add %s dev wire0 && ip link set wire0 txqueuelen 10000 up && ip link set lo up", address);
    if (system(text)) {
        fprintf(stderr, "failed: %s\n", text);
        exit(1);
    }
    return device;
}

/* Hand over what has arrived; return when the next frame does. */
static int64_t deliver(struct way *way, int64_t time) {
    while (way->count && way->queue[way->head].due <= time) {
        struct frame *frame = &way->queue[way->head];
        if (write(way->to, frame->data, frame->size) < 0 && errno == EAGAIN) return time + 1000000;
        way->queued -= frame->size;
        way->head = (way->head + 1) % SLOTS;
        way->count--;
    }
    return way->count ? way->queue[way->head].due : INT64_MAX;
}

/* Take in what a device sends. */
static void accept_frames(struct way *way, int64_t time, double bits_per_ns, int64_t delay, int64_t limit) {
    static unsigned char dropped[LARGEST];
    for (int burst = 0; burst < BURST; burst++) {
        struct frame *frame = &way->queue[(way->head + way->count) % SLOTS];
        int full = way->count == SLOTS || way->queued > limit;
        int size = read(way->from, full ? dropped : frame->data, LARGEST);
        if (size <= 0) return;
        if (full) continue;
        int bytes = size - VIRTIO_HEADER;
        int64_t begin = way->free_at > time ? way->free_at : time;
        way->free_at = begin + (int64_t)((bytes + PACKET_OVERHEAD * (1 + bytes / PACKET)) * 8 / bits_per_ns);
        frame->size = size;
        frame->due = way->free_at + delay;
        way->queued += size;
        way->count++;
    }
}

int main(int argc, char **argv) {
    if (argc != 8) {
        fprintf(stderr, "usage: %s NAMESPACE_A ADDRESS_A NAMESPACE_B ADDRESS_B MBIT_PER_SECOND DELAY_US QUEUE_BYTES\n",
                argv[0]);
        return 2;
    }
    double bits_per_ns = atof(argv[5]) / 1000.0;
    int64_t delay = atoll(argv[6]) * 1000, limit = atoll(argv[7]);
    if (bits_per_ns <= 0 || delay < 0 || limit <= 0) {
        fprintf(stderr, "%s: rate and queue must be positive, the delay not negative\n", argv[0]);
        return 2;
    }
    static struct way ways[2];
    int a = open_device(argv[1], argv[2]), b = open_device(argv[3], argv[4]);
    ways[0].from = ways[1].to = a;
    ways[0].to = ways[1].from = b;
    for (int i = 0; i < 2; i++)
        for (int slot = 0; slot < SLOTS; slot++)
            if (!(ways[i].queue[slot].data = malloc(LARGEST))) fail("malloc");
    puts("up");
    fflush(stdout);
    for (;;) {
        int64_t time = now(), next = INT64_MAX;
        for (int i = 0; i < 2; i++) {
            int64_t due = deliver(&ways[i], time);
            if (due < next) next = due;
        }
        struct pollfd devices[2] = {{a, POLLIN, 0}, {b, POLLIN, 0}};
        int64_t left = next == INT64_MAX ? 0 : next - now();
        if (left < 0) left = 0;
        struct timespec wait = {left / 1000000000, left % 1000000000};
        if (ppoll(devices, 2, next == INT64_MAX ? NULL : &wait, NULL) < 0 && errno != EINTR) fail("ppoll");
        time = now();
        for (int i = 0; i < 2; i++)
            if (devices[i].revents) accept_frames(&ways[i], time, bits_per_ns, delay, limit);
    }
}
