/* mqttload: an MQTT 3.1.1 load generator. One thread, epoll, libc only.
 *
 *   mqttload WORKLOAD HOST PORT [--option value]...
 *
 * Workloads: conn pair fanout fanin rate wild offline source vinfan ecq  (see README.md).
 * Each prints one JSON line; those with sleeping clients print one for each phase: asleep, fill, drain; source: live,
 * fill, drain; ecq: append, drain. --pause makes them wait for a line on stdin after each but the last, so that somebody can look at the broker,
 * or kill and restart it; a line with a number is the broker's new process id. Every payload starts with a 24-byte header
 * (magic, stream, sequence, send time), by which latency, loss, duplication,
 * reordering and misrouting are counted exactly, with one bit per expected delivery.
 *
 * --topics-per-pair K and --size-jitter J vary topic and size from message to message, so that a
 * broker gains nothing from equal packets in a row. Both follow from stream and sequence alone
 * (vary()), so the receiving side knows what topic and what size must arrive, and checks them.
 *
 * --ports A,B,… spreads the clients over several nodes; --shift 1 has publishers at another one than their subscribers.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x4d514c44u
#define HDR 24
#define WFILL 65536         /* a publisher's buffer is filled to this before a write */
#define RCHUNK (512 * 1024) /* most bytes taken by one read */

typedef struct {
    uint32_t magic, stream;
    uint64_t seq, ts;
} Hdr;

enum { ST_NEW, ST_CONNECTING, ST_CONNSENT, ST_SUBSENT, ST_READY, ST_CLOSED };

typedef struct Client {
    int fd, idx;
    uint8_t st, clean, subqos, is_pub, out_armed, granted, blocked, sp, finished, tries;
    char cid[48];
    char **filters;
    int nfilters, subs_pending;
    uint8_t *rb;
    size_t rlen, rcap; /* an unfinished packet */
    uint8_t *wb;
    size_t woff, wlen, wcap;
    /* subscriber */
    uint64_t *map;
    uint32_t *last, *got; /* per stream and topic: the next sequence number; per stream: messages received */
    uint32_t nstreams, per;
    int kind; /* pair, fanin: the stream; wild: the kind of filter */
    /* publisher */
    uint64_t sent, limit;
    uint32_t inflight;
    uint16_t pid;
    uint64_t *pids;
    struct Client *peer;  /* the one that gets this publisher's messages, if it is one, */
    uint32_t peer_stream; /* and as which of its streams */
} Client;

typedef struct {
    char *topic;
    int tlen;
    uint32_t stream;
    uint64_t seq;
    const uint8_t *body;
    size_t blen; /* set only where the payload is not the plain one */
    uint32_t fan;
} Msg;

/* ---- options ---- */
static struct {
    int n, pairs, pubs, subs, topics, qos, size, window, cwin, per, batches, perbatch, srcs, keepalive, spin,
        clean_end, sub, flow, tpp, jitter;
    long msgs;
    double rate, secs, maxsec, idle, settle, hold;
    char *mode, *batch_topic, *tag, *user, *pass, *bpids, *filter, *ports;
    int offline, shared, pause, again, compressible, persistent, shift;
} O = {.n = 1000,
       .pairs = 1,
       .pubs = 1,
       .subs = 20,
       .topics = 10000,
       .qos = 0,
       .size = 64,
       .window = 100,
       .cwin = 64,
       .per = 100,
       .batches = 10,
       .perbatch = 200,
       .keepalive = 1200,
       .tpp = 1,
       .spin = 1,
       .clean_end = 1,
       .msgs = 100000,
       .rate = 1000,
       .secs = 5,
       .idle = 5,
       .settle = 0.3,
       .mode = "loop",
       .batch_topic = "agent/batch/request",
       .tag = NULL};

static struct sockaddr_in dst;
static in_port_t ports[64]; /* of several nodes that are one broker, in network order */
static int nports;
static int ep;
static Client **all;
static int nall, all_cap;
static Client **pubs;
static int npubs;
static uint8_t *rbuf;
static size_t rbuf_cap;
static uint8_t *payload;
static size_t pool; /* offline, source, ecq: each message takes its bytes from elsewhere, so that a store cannot compress them away */

/* ---- counters ---- */
static uint64_t expected, recv_unique, dups, reordered, unexpected, disconnects, conn_fail, acks, pub_bytes,
    sent_total, rx_bytes;
static uint64_t inflight_total;
static int ready_cnt, unfinished;
static bool running, stop_pub, timed_out;
static uint64_t rx_now, t_start, t_first_rx, t_last_rx, t_last_ack, t_progress, t_last_tx;
static uint64_t sess_present;
static int granted_min = 2;
static int nblocked;

static bool (*next_msg)(Client *, Msg *);
static bool (*check_rx)(Client *, const Hdr *, const uint8_t *topic, int tlen, uint32_t *stream,
                        uint64_t *seq);
static bool vin_decode;
static uint32_t rx_topic; /* which of its stream's topics the message under check came on; order counts per topic */

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}
static void die(const char *f, ...) {
    va_list a;
    va_start(a, f);
    fprintf(stderr, "mqttload: ");
    vfprintf(stderr, f, a);
    fputc('\n', stderr);
    exit(2);
}
static void *xcalloc(size_t n, size_t s) {
    void *p = calloc(n ? n : 1, s);
    if (!p) die("no memory");
    return p;
}

/* A well-mixed number for each message: from it come the topic and the size where these vary. */
static uint64_t wmix(uint64_t x) {
    x ^= x >> 31;
    x *= 0x9E3779B97F4A7C15ull;
    x ^= x >> 29;
    return x;
}
static uint64_t vary(uint32_t stream, uint64_t seq) { return wmix(seq * 1000003 + stream * 7919 + 12345); }
static uint32_t topic_of(uint32_t stream, uint64_t seq) {
    return O.tpp > 1 ? (uint32_t)(vary(stream, seq) % (uint64_t)O.tpp) : 0;
}
static size_t size_of(uint32_t stream, uint64_t seq) { /* O.size - O.jitter to O.size + O.jitter, evenly */
    if (!O.jitter) return O.size;
    return O.size - O.jitter + (vary(stream, seq) >> 20) % (2 * (uint64_t)O.jitter + 1);
}

/* ---- latency histogram: 128 linear steps per power of two (under 0.8% error) ---- */
#define SUBB 7
typedef struct {
    uint64_t at[(64 - SUBB) << SUBB], n, max;
} Hist;
static Hist lat, late; /* of deliveries; of the generator behind its own schedule (rate) */
static void hist_add(Hist *h, uint64_t v) {
    int idx;
    if (v > h->max) h->max = v;
    if (v < (1u << SUBB))
        idx = v;
    else {
        int m = 63 - __builtin_clzll(v);
        idx = ((m - SUBB + 1) << SUBB) + (int)((v >> (m - SUBB)) - (1u << SUBB));
    }
    h->at[idx]++;
    h->n++;
}
static double hist_pct(const Hist *h, double p) {
    uint64_t want = (uint64_t)(p * h->n), acc = 0;
    if (want >= h->n) want = h->n ? h->n - 1 : 0;
    for (size_t i = 0; i < sizeof h->at / sizeof *h->at; i++) {
        acc += h->at[i];
        if (acc > want) {
            if (i < (1u << SUBB)) return i / 1e3;
            int m = (int)(i >> SUBB) + SUBB - 1;
            uint64_t lo = ((uint64_t)((i & ((1u << SUBB) - 1)) | (1u << SUBB))) << (m - SUBB);
            return (lo + (1ull << (m - SUBB)) / 2) / 1e3;
        }
    }
    return 0;
}

/* ---- the broker's cost, read from /proc (its descendants included) ---- */
typedef struct {
    double cpu, user, sys;
    long rss_kb, pss_kb;
    double gen;
} Snap;
static int read_file(const char *path, char *buf, size_t cap) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) return -1;
    size_t k = 0;
    ssize_t r;
    while (k + 1 < cap && (r = read(fd, buf + k, cap - 1 - k)) > 0) k += r;
    close(fd);
    buf[k] = 0;
    return (int)k;
}
static void snap_pid(int pid, Snap *s, bool mem) {
    char p[128], b[8192];
    static double tick;
    if (!tick) tick = sysconf(_SC_CLK_TCK);
    snprintf(p, sizeof p, "/proc/%d/stat", pid);
    if (read_file(p, b, sizeof b) <= 0) return;
    char *q = strrchr(b, ')');
    if (!q) return;
    unsigned long u, k;
    if (sscanf(q + 2, "%*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &u, &k) != 2) return;
    s->user += u / tick;
    s->sys += k / tick;
    double c = 0;
    snprintf(p, sizeof p, "/proc/%d/task", pid);
    DIR *d = opendir(p);
    if (d) {
        struct dirent *e;
        while ((e = readdir(d)))
            if (isdigit((unsigned char)e->d_name[0])) {
                snprintf(p, sizeof p, "/proc/%d/task/%.20s/schedstat", pid, e->d_name);
                if (read_file(p, b, sizeof b) > 0) c += strtoull(b, NULL, 10) / 1e9;
            }
        closedir(d);
    }
    s->cpu += c > 0 ? c : (u + k) / tick;
    if (!mem) return;
    snprintf(p, sizeof p, "/proc/%d/statm", pid);
    if (read_file(p, b, sizeof b) > 0) {
        long a, r;
        if (sscanf(b, "%ld %ld", &a, &r) == 2) s->rss_kb += r * (sysconf(_SC_PAGESIZE) / 1024);
    }
    snprintf(p, sizeof p, "/proc/%d/smaps_rollup", pid);
    if (read_file(p, b, sizeof b) > 0) {
        char *z = strstr(b, "\nPss:");
        if (z) s->pss_kb += atol(z + 5);
    }
}
static Snap snap(bool mem) {
    Snap s = {0};
    struct rusage ru;
    getrusage(RUSAGE_SELF, &ru);
    s.gen = ru.ru_utime.tv_sec + ru.ru_stime.tv_sec + (ru.ru_utime.tv_usec + ru.ru_stime.tv_usec) / 1e6;
    if (!O.bpids) return s;
    static int pid[4096], par[4096];
    int n = 0;
    bool in[4096] = {0};
    DIR *d = opendir("/proc");
    struct dirent *e;
    char p[300], b[2048];
    while (d && (e = readdir(d)) && n < 4096)
        if (isdigit((unsigned char)e->d_name[0])) {
            snprintf(p, sizeof p, "/proc/%s/stat", e->d_name);
            if (read_file(p, b, sizeof b) <= 0) continue;
            char *q = strrchr(b, ')');
            int pp;
            if (!q || sscanf(q + 2, "%*c %d", &pp) != 1) continue;
            pid[n] = atoi(e->d_name);
            par[n++] = pp;
        }
    if (d) closedir(d);
    for (char *q = O.bpids; *q;) {
        int v = strtol(q, &q, 10);
        if (*q == ',') q++;
        for (int i = 0; i < n; i++)
            if (pid[i] == v) in[i] = true;
    }
    for (bool more = true; more;) {
        more = false;
        for (int i = 0; i < n; i++)
            if (!in[i])
                for (int j = 0; j < n; j++)
                    if (in[j] && pid[j] == par[i]) {
                        in[i] = more = true;
                        break;
                    }
    }
    for (int i = 0; i < n; i++)
        if (in[i]) snap_pid(pid[i], &s, mem);
    return s;
}

/* ---- clients ---- */
static Client *mk(const char *fmt, ...) {
    Client *c = xcalloc(1, sizeof *c);
    va_list a;
    va_start(a, fmt);
    vsnprintf(c->cid, sizeof c->cid, fmt, a);
    va_end(a);
    if (nall == all_cap) {
        all_cap = all_cap ? all_cap * 2 : 1024;
        all = realloc(all, all_cap * sizeof *all);
        if (!all) die("no memory");
    }
    c->fd = -1;
    c->idx = nall;
    c->clean = 1;
    all[nall++] = c;
    return c;
}
static void add_filter(Client *c, const char *f) {
    if ((c->nfilters & (c->nfilters - 1)) == 0)
        c->filters = realloc(c->filters, (c->nfilters ? c->nfilters * 2 : 1) * sizeof(char *));
    c->filters[c->nfilters++] = strdup(f);
}
static void track(Client *c, uint32_t nstreams, uint32_t per) {
    c->nstreams = nstreams;
    c->per = per;
    c->map = xcalloc(((size_t)nstreams * per + 63) / 64, 8);
    c->last = xcalloc((size_t)nstreams * O.tpp, 4);
    c->got = xcalloc(nstreams, 4);
}
static void ev_set(Client *c, bool out) {
    if (c->out_armed == out || c->fd < 0) return;
    struct epoll_event e = {.events = EPOLLIN | (out ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
    c->out_armed = out;
}
static inline uint8_t *room(Client *c, size_t n) {
    if (c->wcap - c->wlen < n) {
        if (c->woff) {
            memmove(c->wb, c->wb + c->woff, c->wlen - c->woff);
            c->wlen -= c->woff;
            c->woff = 0;
        }
        if (c->wcap - c->wlen < n) {
            size_t k = c->wcap ? c->wcap : 256;
            while (k - c->wlen < n) k *= 2;
            c->wb = realloc(c->wb, k);
            if (!c->wb) die("no memory");
            c->wcap = k;
        }
    }
    return c->wb + c->wlen;
}
static void start_connect(Client *c);
static void client_down(Client *c) {
    if (c->fd >= 0) {
        close(c->fd);
        c->fd = -1;
    }
    bool was_ready = c->st == ST_READY;
    c->st = ST_CLOSED;
    c->wlen = c->woff = c->rlen = 0;
    c->out_armed = 0;
    if (was_ready) {
        disconnects++;
        ready_cnt--;
        inflight_total -= c->inflight;
        c->inflight = 0;
        if (c->is_pub && !c->finished) {
            c->finished = 1;
            unfinished--;
        }
    } else if (c->tries++ < 5) {
        usleep(20000);
        start_connect(c);
    } else {
        conn_fail++;
        ready_cnt++;
    }
}
static bool flush_c(Client *c) {
    while (c->woff < c->wlen) {
        ssize_t r = send(c->fd, c->wb + c->woff, c->wlen - c->woff, MSG_NOSIGNAL);
        if (r < 0) {
            if (errno == EAGAIN) {
                ev_set(c, true);
                return true;
            }
            if (errno == EINTR) continue;
            client_down(c);
            return false;
        }
        c->woff += r;
        t_progress = rx_now;
    }
    c->woff = c->wlen = 0;
    if (c->out_armed && !(c->is_pub && running && !c->finished && O.qos == 0 && !c->blocked))
        ev_set(c, false);
    return true;
}
static inline void put_ack(Client *c, uint8_t type, uint16_t pid) {
    uint8_t *w = room(c, 4);
    w[0] = type;
    w[1] = 2;
    w[2] = pid >> 8;
    w[3] = pid;
    c->wlen += 4;
}
static inline int varlen(uint8_t *w, uint32_t v) {
    int n = 0;
    do {
        uint8_t b = v & 127;
        v >>= 7;
        if (v) b |= 128;
        w[n++] = b;
    } while (v);
    return n;
}
static void put_str(Client *c, const char *s, size_t n) {
    uint8_t *w = room(c, n + 2);
    w[0] = n >> 8;
    w[1] = n;
    memcpy(w + 2, s, n);
    c->wlen += n + 2;
}
static void put_connect(Client *c) {
    size_t n =
        10 + 2 + strlen(c->cid) + (O.user ? 2 + strlen(O.user) : 0) + (O.pass ? 2 + strlen(O.pass) : 0);
    uint8_t *w = room(c, 16);
    int k = 0;
    w[k++] = 0x10;
    k += varlen(w + k, n);
    memcpy(w + k, "\0\4MQTT\4", 7);
    k += 7;
    w[k++] = (c->clean ? 2 : 0) | (O.user ? 0x80 : 0) | (O.pass ? 0x40 : 0);
    w[k++] = O.keepalive >> 8;
    w[k++] = O.keepalive;
    c->wlen += k;
    put_str(c, c->cid, strlen(c->cid));
    if (O.user) put_str(c, O.user, strlen(O.user));
    if (O.pass) put_str(c, O.pass, strlen(O.pass));
}
static void put_subs(Client *c) {
    for (int i = 0; i < c->nfilters;) {
        int e = i;
        size_t n = 2;
        while (e < c->nfilters && e - i < 100) n += 3 + strlen(c->filters[e++]);
        uint8_t *w = room(c, 8);
        int k = 0;
        w[k++] = 0x82;
        k += varlen(w + k, n);
        if (!++c->pid) c->pid = 1;
        w[k++] = c->pid >> 8;
        w[k++] = c->pid;
        c->wlen += k;
        for (; i < e; i++) {
            put_str(c, c->filters[i], strlen(c->filters[i]));
            *room(c, 1) = c->subqos;
            c->wlen++;
        }
        c->subs_pending++;
    }
}
static void start_connect(Client *c) {
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) die("socket: %s", strerror(errno));
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (O.srcs > 1) { /* several loopback source addresses: more than 28,000 connections */
        setsockopt(c->fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &one, sizeof one);
        struct sockaddr_in s = {.sin_family = AF_INET,
                                .sin_addr.s_addr = htonl(0x7f000001u + c->idx % O.srcs)};
        if (bind(c->fd, (void *)&s, sizeof s)) die("bind: %s", strerror(errno));
    }
    if (nports) /* publisher i is --shift ports away from subscriber i */
        dst.sin_port = ports[(c->is_pub ? c->kind + O.shift : c->idx) % nports];
    if (connect(c->fd, (void *)&dst, sizeof dst) && errno != EINPROGRESS) {
        c->st = ST_CONNECTING;
        client_down(c);
        return;
    }
    c->st = ST_CONNECTING;
    c->out_armed = 1;
    c->subs_pending = 0;
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    if (epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e)) die("epoll_ctl: %s", strerror(errno));
}

/* ---- publishing ---- */
static inline bool pid_take(Client *c, uint16_t *out) {
    for (int i = 0; i < 65535; i++) {
        if (!++c->pid) c->pid = 1;
        uint64_t *w = &c->pids[c->pid >> 6], b = 1ull << (c->pid & 63);
        if (!(*w & b)) {
            *w |= b;
            *out = c->pid;
            return true;
        }
    }
    return false;
}
static inline void pid_free(Client *c, uint16_t pid) {
    if (!c->pids) return;
    uint64_t *w = &c->pids[pid >> 6], b = 1ull << (pid & 63);
    if (*w & b) {
        *w &= ~b;
        c->inflight--;
        inflight_total--;
        acks++;
        t_last_ack = rx_now;
        t_progress = rx_now;
    }
}
static inline void put_publish(Client *c, const Msg *m, uint64_t ts) {
    size_t bl = m->body ? m->blen : size_of(m->stream, m->seq), rem = 2 + m->tlen + (O.qos ? 2 : 0) + bl;
    uint8_t *w = room(c, rem + 5), *w0 = w;
    *w++ = 0x30 | O.qos << 1;
    w += varlen(w, rem);
    *w++ = m->tlen >> 8;
    *w++ = m->tlen;
    memcpy(w, m->topic, m->tlen);
    w += m->tlen;
    if (O.qos) {
        uint16_t pid = 0;
        if (!c->pids) c->pids = xcalloc(1024, 8);
        pid_take(c, &pid);
        *w++ = pid >> 8;
        *w++ = pid;
        c->inflight++;
        inflight_total++;
    }
    if (m->body)
        memcpy(w, m->body, bl);
    else {
        Hdr h = {MAGIC, m->stream, m->seq, ts};
        memcpy(w, &h, HDR);
        memcpy(w + HDR, payload + HDR + (pool ? vary(m->stream, m->seq) % pool : 0), bl - HDR);
    }
    w += bl;
    c->wlen += w - w0;
    pub_bytes += w - w0;
    c->sent++;
    sent_total++;
    expected += m->fan;
}
static uint64_t pump_ts;
/* --flow: are as many of this publisher's messages under way as may be? */
static inline bool flow_full(const Client *c) {
    if (!O.flow) return false;
    if (c->peer) return c->sent - c->peer->got[c->peer_stream] >= (uint64_t)O.flow;
    return expected - recv_unique >= (uint64_t)O.flow;
}
static void pump(Client *c) {
    if (!running || c->st != ST_READY || c->finished) return;
    if (c->wlen - c->woff >= WFILL) return;
    Msg m;
    pump_ts = now_ns();
    t_last_tx = pump_ts;
    uint32_t win = O.window > 65000 ? 65000 : O.window;
    while (c->wlen - c->woff < WFILL && (O.qos == 0 || c->inflight < win)) {
        if (flow_full(c)) {
            if (!c->blocked) {
                c->blocked = 1;
                nblocked++;
            }
            break;
        }
        if (stop_pub || c->sent >= c->limit) {
            c->finished = 1;
            unfinished--;
            break;
        }
        memset(&m, 0, sizeof m);
        if (!next_msg(c, &m)) {
            c->finished = 1;
            unfinished--;
            break;
        }
        put_publish(c, &m, pump_ts);
    }
    if (c->wlen > c->woff) flush_c(c);
    if (c->st == ST_READY && O.qos == 0 && !c->out_armed && !c->finished && !c->blocked) ev_set(c, true);
    if (c->st == ST_READY && c->out_armed && c->wlen == c->woff && (c->finished || c->blocked))
        ev_set(c, false);
}

/* ---- receiving ---- */
static int b64v(int ch) {
    return ch >= 'A' && ch <= 'Z'   ? ch - 'A'
           : ch >= 'a' && ch <= 'z' ? ch - 'a' + 26
           : ch >= '0' && ch <= '9' ? ch - '0' + 52
           : ch == '+'              ? 62
           : ch == '/'              ? 63
                                    : -1;
}
static bool b64_hdr(const uint8_t *p, size_t n, Hdr *h) {
    if (n < 32) return false;
    uint8_t o[24];
    for (int i = 0; i < 8; i++) {
        uint32_t v = 0;
        for (int j = 0; j < 4; j++) {
            int x = b64v(p[i * 4 + j]);
            if (x < 0) return false;
            v = v << 6 | x;
        }
        o[i * 3] = v >> 16;
        o[i * 3 + 1] = v >> 8;
        o[i * 3 + 2] = v;
    }
    memcpy(h, o, HDR);
    return h->magic == MAGIC;
}
static void on_publish(Client *c, const uint8_t *topic, int tlen, const uint8_t *pl, size_t n) {
    Hdr h;
    bool ok = false;
    if (n >= HDR) {
        memcpy(&h, pl, HDR);
        ok = h.magic == MAGIC && (vin_decode || n == size_of(h.stream, h.seq));
    }
    if (!ok && vin_decode) { /* a broker may hand on the base64 text, or a JSON that holds it */
        ok = b64_hdr(pl, n, &h);
        if (!ok) {
            const uint8_t *q = memmem(pl, n, "\"data\"", 6);
            if (q) {
                q += 6;
                const uint8_t *e = pl + n;
                while (q < e && (*q == ' ' || *q == ':')) q++;
                if (q < e && *q == '"') ok = b64_hdr(q + 1, e - q - 1, &h);
            }
        }
    }
    uint32_t s;
    uint64_t q;
    rx_topic = 0;
    if (!ok || !check_rx || !check_rx(c, &h, topic, tlen, &s, &q) || s >= c->nstreams || q >= c->per) {
        unexpected++;
        return;
    }
    size_t bit = (size_t)s * c->per + q;
    uint64_t m = 1ull << (bit & 63);
    if (c->map[bit >> 6] & m) {
        dups++;
        return;
    }
    c->map[bit >> 6] |= m;
    recv_unique++;
    c->got[s]++;
    uint32_t *last = &c->last[(size_t)s * O.tpp + rx_topic];
    if (q + 1 < *last)
        reordered++;
    else
        *last = q + 1;
    hist_add(&lat, rx_now > h.ts ? rx_now - h.ts : 0);
    if (!t_first_rx) t_first_rx = rx_now;
    t_last_rx = rx_now;
}
static void on_packet(Client *c, uint8_t b0, const uint8_t *p, size_t n) {
    switch (b0 >> 4) {
    case 3: {
        int tl = p[0] << 8 | p[1];
        int qos = b0 >> 1 & 3;
        size_t o = 2 + tl + (qos ? 2 : 0);
        if (o > n) die("malformed PUBLISH from broker");
        on_publish(c, p + 2, tl, p + o, n - o);
        if (qos) put_ack(c, qos == 1 ? 0x40 : 0x50, p[2 + tl] << 8 | p[3 + tl]);
        t_progress = rx_now;
        break;
    }
    case 4:
    case 7: pid_free(c, p[0] << 8 | p[1]); break;
    case 5: put_ack(c, 0x62, p[0] << 8 | p[1]); break;
    case 6: put_ack(c, 0x70, p[0] << 8 | p[1]); break;
    case 2:
        if (p[1]) {
            fprintf(stderr, "mqttload: CONNACK refused: %d\n", p[1]);
            client_down(c);
            break;
        }
        c->sp = p[0] & 1;
        sess_present += c->sp;
        if (c->nfilters && !(c->sp && !c->clean)) {
            put_subs(c);
            c->st = ST_SUBSENT;
        } else {
            c->st = ST_READY;
            ready_cnt++;
        }
        break;
    case 9:
        for (size_t i = 2; i < n; i++) {
            if (p[i] == 0x80) die("SUBACK: refused");
            if (p[i] < granted_min && p[i] < c->subqos) granted_min = p[i];
        }
        if (--c->subs_pending == 0 && c->st == ST_SUBSENT) {
            c->st = ST_READY;
            ready_cnt++;
        }
        break;
    case 13: break;
    default: die("unexpected packet type %d from broker", b0 >> 4);
    }
}
static void on_readable(Client *c) {
    size_t have = c->rlen;
    if (rbuf_cap < have + RCHUNK) {
        rbuf_cap = have + RCHUNK;
        rbuf = realloc(rbuf, rbuf_cap);
        if (!rbuf) die("no memory");
    }
    ssize_t r = recv(c->fd, rbuf + have, RCHUNK, 0);
    if (r < 0) {
        if (errno == EAGAIN || errno == EINTR) return;
        client_down(c);
        return;
    }
    if (r == 0) {
        client_down(c);
        return;
    }
    rx_bytes += r;
    rx_now = now_ns();
    if (have) memcpy(rbuf, c->rb, have);
    size_t len = have + r, o = 0;
    while (len - o >= 2) {
        uint32_t rem = 0;
        int k = 1, sh = 0;
        bool done = false;
        while (k <= 4 && o + k < len) {
            uint8_t b = rbuf[o + k++];
            rem |= (uint32_t)(b & 127) << sh;
            sh += 7;
            if (!(b & 128)) {
                done = true;
                break;
            }
        }
        if (!done) {
            if (k > 4) die("malformed length from broker");
            break;
        }
        if (len - o < (size_t)k + rem) break;
        on_packet(c, rbuf[o], rbuf + o + k, rem);
        o += k + rem;
        if (c->fd < 0 || c->st == ST_CLOSED || c->st == ST_CONNECTING) return;
    }
    c->rlen = len - o;
    if (c->rlen) {
        if (c->rcap < c->rlen) {
            c->rcap = c->rlen * 2;
            c->rb = realloc(c->rb, c->rcap);
            if (!c->rb) die("no memory");
        }
        memcpy(c->rb, rbuf + o, c->rlen);
    }
    if (c->is_pub && running && O.qos) pump(c);
    if (c->wlen > c->woff && !(c->out_armed && O.qos == 0 && c->is_pub)) flush_c(c);
}
static void loop_once(int ms) {
    static struct epoll_event ev[2048];
    int n = epoll_wait(ep, ev, 2048, ms);
    rx_now = now_ns();
    for (int i = 0; i < n; i++) {
        Client *c = ev[i].data.ptr;
        if (c->fd < 0) continue;
        if (c->st == ST_CONNECTING) {
            if (ev[i].events & (EPOLLOUT | EPOLLERR | EPOLLHUP)) {
                int er = 0;
                socklen_t l = sizeof er;
                getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &er, &l);
                if (er) {
                    client_down(c);
                    continue;
                }
                c->st = ST_CONNSENT;
                put_connect(c);
                flush_c(c);
            }
            continue;
        }
        if (ev[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(c);
        if (c->fd >= 0 && (ev[i].events & EPOLLOUT) && c->st != ST_CONNECTING) {
            if (c->wlen > c->woff && !flush_c(c)) continue;
            if (c->is_pub && running) pump(c);
        }
    }
    for (int i = 0; nblocked && i < npubs; i++)
        if (pubs[i]->blocked && !flow_full(pubs[i])) {
            pubs[i]->blocked = 0;
            nblocked--;
            pump(pubs[i]);
        }
}
static void connect_all(Client **cs, int n) {
    int next = 0;
    ready_cnt = 0;
    uint64_t stall = now_ns();
    int seen = 0;
    while (ready_cnt < n) {
        while (next < n && next - ready_cnt < O.cwin) {
            cs[next]->tries = 0;
            start_connect(cs[next++]);
        }
        loop_once(100);
        if (ready_cnt != seen) {
            seen = ready_cnt;
            stall = now_ns();
        } else if (now_ns() - stall > 60e9)
            die("connecting stalled at %d of %d", ready_cnt, n);
    }
    if (conn_fail && next_msg) die("%lu clients could not connect", conn_fail);
}
static void disconnect_all(Client **cs, int n) {
    for (int i = 0; i < n; i++)
        if (cs[i]->fd >= 0) {
            uint8_t d[2] = {0xe0, 0};
            (void)!send(cs[i]->fd, d, 2, MSG_NOSIGNAL);
        }
    usleep(50000);
    for (int i = 0; i < n; i++)
        if (cs[i]->fd >= 0) {
            close(cs[i]->fd);
            cs[i]->fd = -1;
            cs[i]->st = ST_NEW;
            cs[i]->rlen = cs[i]->wlen = cs[i]->woff = 0;
            cs[i]->out_armed = 0;
        }
}
static void settle(double s) {
    uint64_t e = now_ns() + (uint64_t)(s * 1e9);
    while (now_ns() < e) loop_once(10);
}
static void start_pubs(void) {
    pubs = xcalloc(nall, sizeof *pubs);
    npubs = 0;
    for (int i = 0; i < nall; i++)
        if (all[i]->is_pub) pubs[npubs++] = all[i];
    unfinished = npubs;
    running = true;
    stop_pub = timed_out = false;
    t_start = rx_now = t_progress = now_ns();
    for (int i = 0; i < npubs; i++) pump(pubs[i]);
}
static void run_until_done(bool need_rx) {
    for (;;) {
        if (!unfinished && (!need_rx || recv_unique >= expected) && inflight_total == 0) break;
        loop_once(100);
        uint64_t t = now_ns();
        if (O.maxsec > 0 && !stop_pub && (t - t_start) / 1e9 > O.maxsec) {
            stop_pub = true;
            for (int i = 0; i < npubs; i++) {
                Client *c = pubs[i];
                if (c->finished) continue;
                if (c->blocked) {
                    c->blocked = 0;
                    nblocked--;
                }
                c->finished = 1;
                unfinished--;
                if (c->wlen == c->woff) ev_set(c, false);
            }
        }
        if ((t - t_progress) / 1e9 > O.idle) {
            timed_out = true;
            break;
        }
    }
    running = false;
}
/* A duplicate may come after the last message that was waited for: look a little longer. */
static void linger(void) { settle(0.2); }

/* ---- output ---- */
static char out[8192];
static int out_len;
static void J(const char *f, ...) {
    va_list a;
    va_start(a, f);
    out_len += vsnprintf(out + out_len, sizeof out - out_len, f, a);
    va_end(a);
}
static void j_open(const char *w) {
    J("{\"workload\":\"%s\",\"qos\":%d,\"size\":%d,\"size_jitter\":%d,\"topics_per_pair\":%d", w, O.qos, O.size,
      O.jitter, O.tpp);
}
static void j_lat(void) {
    J(",\"lat_us\":{\"p50\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f}", hist_pct(&lat, .5),
      hist_pct(&lat, .99), hist_pct(&lat, .999), lat.max / 1e3);
}
static void j_cost(const char *pre, Snap a, Snap b, double wall, double ops) {
    double g = b.gen - a.gen;
    J(",\"%sgen_cpu_s\":%.3f,\"%sgen_util\":%.2f", pre, g, pre, wall > 0 ? g / wall : 0);
    if (!O.bpids) return;
    double c = b.cpu - a.cpu;
    J(",\"%sbroker_cpu_s\":%.3f,\"%sbroker_user_s\":%.2f,\"%sbroker_sys_s\":%.2f,\"%sbroker_util\":%.2f,\"%"
      "scpu_s_per_M\":%.3f,\"%srss_kb\":%ld,\"%spss_kb\":%ld",
      pre, c, pre, b.user - a.user, pre, b.sys - a.sys, pre, wall > 0 ? c / wall : 0, pre,
      ops > 0 ? c / ops * 1e6 : 0, pre, b.rss_kb, pre, b.pss_kb);
}
static void j_counts(void) {
    J(",\"sent\":%lu,\"expected\":%lu,\"received\":%lu,\"lost\":%lu,\"dup\":%lu,\"reordered\":%lu,"
      "\"unexpected\":%lu,\"disconnects\":%lu,\"conn_fail\":%lu,\"unacked\":%lu,\"timed_out\":%s,\"granted_"
      "qos\":%d",
      sent_total, expected, recv_unique, expected - recv_unique, dups, reordered, unexpected, disconnects,
      conn_fail, inflight_total, timed_out ? "true" : "false", granted_min < O.qos ? granted_min : O.qos);
}
static void j_close(void) {
    J("}");
    puts(out);
    fflush(stdout);
}

/* ---- workloads ---- */
static char **topics;
static int *tlens;
static void mk_topics(int n, const char *fmt) { /* fmt: tag, index */
    topics = xcalloc(n, sizeof *topics);
    tlens = xcalloc(n, sizeof *tlens);
    for (int i = 0; i < n; i++) {
        if (asprintf(&topics[i], fmt, O.tag, i) < 0) die("no memory");
        tlens[i] = strlen(topics[i]);
    }
}
/* O.tpp topics for each of n streams, one after the other. The names differ in length, as real ones do. */
static void mk_varied_topics(int n, const char *kind) {
    static const char word[] = "engine_temperature";
    topics = xcalloc((size_t)n * O.tpp, sizeof *topics);
    tlens = xcalloc((size_t)n * O.tpp, sizeof *tlens);
    for (int i = 0; i < n * O.tpp; i++) {
        int len = 1 + i % O.tpp * 5 % (int)(sizeof word - 1);
        tlens[i] = asprintf(&topics[i], "%s/%s/%d/%.*s%d", O.tag, kind, i / O.tpp, len, word, i % O.tpp);
        if (tlens[i] < 0) die("no memory");
    }
}
static uint32_t fan_const = 1;
static bool nm_stream(Client *c, Msg *m) {
    int t = c->kind * O.tpp + (int)topic_of(c->kind, c->sent);
    m->topic = topics[t];
    m->tlen = tlens[t];
    m->stream = c->kind;
    m->seq = c->sent;
    m->fan = fan_const;
    return true;
}
static bool on_its_topic(const Hdr *h, const uint8_t *t, int tl) {
    rx_topic = topic_of(h->stream, h->seq);
    size_t i = (size_t)h->stream * O.tpp + rx_topic;
    return tl == tlens[i] && !memcmp(t, topics[i], tl);
}
static bool cr_own(Client *c, const Hdr *h, const uint8_t *t, int tl, uint32_t *s,
                   uint64_t *q) { /* one stream, its own */
    *s = 0;
    *q = h->seq;
    return (int)h->stream == c->kind && on_its_topic(h, t, tl);
}
static bool cr_any(Client *c, const Hdr *h, const uint8_t *t, int tl, uint32_t *s, uint64_t *q) {
    *s = h->stream;
    *q = h->seq;
    return h->stream < c->nstreams && on_its_topic(h, t, tl);
}

static void measure(const char *name) {
    settle(O.settle);
    Snap a = snap(false);
    start_pubs();
    run_until_done(true);
    double wall = (now_ns() - t_start) / 1e9;
    Snap b = snap(true);
    linger();
    double secs = (t_last_rx > t_start ? t_last_rx - t_start : 1) / 1e9;
    j_open(name);
    J(",\"secs\":%.3f,\"rate\":%.0f,\"pub_rate\":%.0f", secs, recv_unique / secs,
      sent_total / ((t_last_tx > t_start ? t_last_tx - t_start : 1) / 1e9));
    j_counts();
    j_lat();
    j_cost("", a, b, wall, recv_unique);
}
static void w_conn(void) {
    char f[128];
    for (int i = 0; i < O.n; i++) {
        Client *c = mk("%s-c%d", O.tag, i);
        if (O.sub) {
            snprintf(f, sizeof f, "%s/c/%d/+", O.tag, i);
            c->subqos = 1;
            add_filter(c, O.filter ? O.filter : f);
        }
    }
    Snap a = snap(true);
    uint64_t t = now_ns();
    connect_all(all, nall);
    double s = (now_ns() - t) / 1e9;
    Snap m = snap(false);
    settle(1.0);
    Snap b = snap(true);
    j_open("conn");
    J(",\"n\":%d,\"sub\":%d,\"secs\":%.3f,\"connects_per_s\":%.0f,\"conn_fail\":%lu,\"disconnects\":%lu,"
      "\"gen_cpu_s\":%.3f,\"gen_util\":%.2f",
      O.n, O.sub, s, O.n / s, conn_fail, disconnects, m.gen - a.gen, (m.gen - a.gen) / s);
    if (O.bpids)
        J(",\"broker_cpu_s\":%.3f,\"broker_util\":%.2f,\"cpu_s_per_M\":%.1f,\"rss_before_kb\":%ld,\"rss_"
          "after_kb\":%ld,\"rss_per_conn_bytes\":%.0f,\"pss_per_conn_bytes\":%.0f",
          m.cpu - a.cpu, (m.cpu - a.cpu) / s, (m.cpu - a.cpu) / O.n * 1e6, a.rss_kb, b.rss_kb,
          (b.rss_kb - a.rss_kb) * 1024.0 / O.n, (b.pss_kb - a.pss_kb) * 1024.0 / O.n);
    j_close();
    if (O.hold > 0) settle(O.hold);
}
static void drop_sessions(Client **cs, int n);
static void w_pair(bool rate) {
    int P = O.pairs;
    long per = rate ? (long)(O.rate * O.secs) / P + 1 : (O.msgs + P - 1) / P;
    if (O.tpp > 1)
        mk_varied_topics(P, "pair");
    else
        mk_topics(P, "%s/pair/%d");
    for (int i = 0; i < P; i++) {
        Client *c = mk("%s-s%d", O.tag, i);
        c->clean = !O.persistent;
        c->subqos = O.qos;
        c->kind = i;
        for (int k = 0; k < O.tpp; k++) add_filter(c, topics[i * O.tpp + k]);
        track(c, 1, per);
    }
    for (int i = 0; i < P; i++) {
        Client *c = mk("%s-p%d", O.tag, i);
        c->is_pub = 1;
        c->kind = i;
        c->limit = per;
        c->peer = all[i];
    }
    next_msg = nm_stream;
    check_rx = cr_own;
    connect_all(all, nall);
    if (!rate) {
        measure("pair");
        J(",\"pairs\":%d,\"window\":%d,\"flow\":%d", P, O.window, O.flow);
        j_close();
        if (O.persistent) drop_sessions(all, P);
        return;
    }
    settle(O.settle);
    Snap a = snap(false);
    prctl(PR_SET_TIMERSLACK, 1);
    t_start = rx_now = t_progress = now_ns();
    running = false;
    long total = (long)(O.rate * O.secs), k = 0;
    double gap = 1e9 / O.rate;
    uint64_t skipped = 0;
    for (;;) {
        uint64_t t = now_ns();
        while (k < total) { /* open loop: the time a message was due is its time stamp */
            uint64_t due = t_start + (uint64_t)(k * gap);
            if (due > t) break;
            Client *c = all[P + k % P];
            if (c->st != ST_READY || c->inflight >= 65000) {
                skipped++;
                k++;
                continue;
            }
            hist_add(&late, t - due);
            Msg m = {0};
            nm_stream(c, &m);
            put_publish(c, &m, due);
            t_last_tx = t;
            flush_c(c);
            k++;
        }
        if (k >= total && recv_unique >= expected && !inflight_total) break;
        int ms = 0;
        if (!O.spin) {
            uint64_t due = t_start + (uint64_t)(k * gap);
            t = now_ns();
            ms = k >= total ? 100 : due > t + 1500000 ? (int)((due - t) / 1000000) - 1 : 0;
        }
        loop_once(ms);
        if ((now_ns() - t_progress) / 1e9 > O.idle) {
            timed_out = true;
            break;
        }
    }
    double wall = (now_ns() - t_start) / 1e9;
    Snap b = snap(true);
    linger();
    double secs = (t_last_rx - t_start) / 1e9;
    j_open("rate");
    J(",\"secs\":%.3f,\"rate\":%.0f,\"target_rate\":%.0f,\"pairs\":%d,\"skipped\":%lu,"
      "\"gen_late_us\":{\"p50\":%.1f,\"p99\":%.1f,\"max\":%.1f}",
      secs, recv_unique / secs, O.rate, P, skipped, hist_pct(&late, .5), hist_pct(&late, .99), late.max / 1e3);
    j_counts();
    j_lat();
    j_cost("", a, b, wall, recv_unique);
    j_close();
}
static void w_fanout(void) {
    mk_topics(1, "%s/fanout/%d");
    for (int i = 0; i < O.n; i++) {
        Client *c = mk("%s-s%d", O.tag, i);
        c->subqos = O.qos;
        c->kind = 0;
        add_filter(c, topics[0]);
        track(c, 1, O.msgs);
    }
    Client *p = mk("%s-p", O.tag);
    p->is_pub = 1;
    p->limit = O.msgs;
    fan_const = O.n;
    if (O.flow) O.flow *= O.n;
    next_msg = nm_stream;
    check_rx = cr_own;
    connect_all(all, nall);
    measure("fanout");
    J(",\"subs\":%d,\"window\":%d,\"flow\":%d", O.n, O.window, O.flow / O.n);
    j_close();
}
static void w_fanin(void) {
    char f[128];
    long per = (O.msgs + O.n - 1) / O.n;
    if (O.tpp > 1)
        mk_varied_topics(O.n, "fanin");
    else
        mk_topics(O.n, "%s/fanin/%d/x");
    snprintf(f, sizeof f, O.tpp > 1 ? "%s/fanin/+/+" : "%s/fanin/+/x", O.tag);
    Client *s = mk("%s-s", O.tag);
    s->subqos = O.qos;
    add_filter(s, f);
    track(s, O.n, per);
    for (int i = 0; i < O.n; i++) {
        Client *c = mk("%s-p%d", O.tag, i);
        c->is_pub = 1;
        c->kind = i;
        c->limit = per;
        c->peer = s;
        c->peer_stream = i;
    }
    next_msg = nm_stream;
    check_rx = cr_any;
    connect_all(all, nall);
    measure("fanin");
    J(",\"pubs\":%d,\"window\":%d,\"flow\":%d", O.n, O.window, O.flow);
    j_close();
}
/* wild: T = I*J topics TAG/{i}/b/{j}/c. Four kinds of filter, each client of one kind only, so that no
 * client's own filters overlap (a broker may deliver once or once per overlapping filter: both are allowed,
 * neither can be counted). */
static int wI, wJ;
static int *own[4];
static int wtopic(uint32_t stream, uint64_t seq) { return (int)(vary(stream, seq) % ((uint64_t)wI * wJ)); }
static bool nm_wild(Client *c, Msg *m) {
    int t = wtopic(c->kind, c->sent), i = t / wJ, j = t % wJ;
    m->topic = topics[t];
    m->tlen = tlens[t];
    m->stream = c->kind;
    m->seq = c->sent;
    m->fan = (own[0][i] >= 0) + (own[1][j] >= 0) + (own[2][t] >= 0) + (own[3][t] >= 0);
    return true;
}
static bool cr_wild(Client *c, const Hdr *h, const uint8_t *tp, int tl, uint32_t *s, uint64_t *q) {
    int t = wtopic(h->stream, h->seq), i = t / wJ, j = t % wJ;
    if (tl != tlens[t] || memcmp(tp, topics[t], tl)) return false;
    int o = c->kind == 0 ? own[0][i] : c->kind == 1 ? own[1][j] : own[c->kind][t];
    *s = h->stream;
    *q = h->seq;
    return o == c->idx;
}
static void w_wild(void) {
    wI = 1;
    while ((wI + 1) * (wI + 1) <= O.topics) wI++;
    wJ = O.topics / wI;
    int T = wI * wJ;
    topics = xcalloc(T, sizeof *topics);
    tlens = xcalloc(T, sizeof *tlens);
    for (int t = 0; t < T; t++) {
        if (asprintf(&topics[t], "%s/%d/b/%d/c", O.tag, t / wJ, t % wJ) < 0) die("no memory");
        tlens[t] = strlen(topics[t]);
    }
    for (int k = 0; k < 4; k++) {
        own[k] = xcalloc(T, sizeof(int));
        for (int t = 0; t < T; t++) own[k][t] = -1;
    }
    int K = O.subs < 4 ? 4 : O.subs & ~3;
    long per = (O.msgs + O.pubs - 1) / O.pubs;
    char f[128];
    int made = 0;
    for (int i = 0; i < K; i++) {
        Client *c = mk("%s-s%d", O.tag, i);
        c->subqos = O.qos;
        c->kind = i % 4;
        track(c, O.pubs, per);
    }
    for (int s = 0, n0 = 0, n1 = 0, n2 = 0; s < O.n; s++) {
        int kind = n0 < wI && n0 * 4 < O.n && n0 <= n1 ? 0 : n1 < wJ && n1 * 4 < O.n ? 1 : 2 + (n2 & 1);
        int key = kind == 0 ? n0++ : kind == 1 ? n1++ : (int)(wmix(n2++ / 2 + (kind == 3 ? 77777 : 1)) % T);
        if (kind > 1) {
            int g = 0;
            while (own[kind][key] >= 0 && g++ < T) key = (key + 1) % T;
            if (g >= T) break;
        }
        Client *c = all[kind + 4 * (s / 4 % (K / 4))];
        own[kind][key] = c->idx;
        made++;
        if (kind == 0)
            snprintf(f, sizeof f, "%s/%d/b/#", O.tag, key);
        else if (kind == 1)
            snprintf(f, sizeof f, "%s/+/b/%d/#", O.tag, key);
        else if (kind == 2)
            snprintf(f, sizeof f, "%s/%d/+/%d/+", O.tag, key / wJ, key % wJ);
        else
            snprintf(f, sizeof f, "+/%d/b/%d/c", key / wJ, key % wJ);
        add_filter(c, f);
    }
    for (int i = 0; i < O.pubs; i++) {
        Client *c = mk("%s-p%d", O.tag, i);
        c->is_pub = 1;
        c->kind = i;
        c->limit = per;
    }
    next_msg = nm_wild;
    check_rx = cr_wild;
    connect_all(all, nall);
    measure("wild");
    J(",\"topics\":%d,\"filters\":%d,\"subs\":%d,\"pubs\":%d,\"window\":%d,\"flow\":%d", T, made, K, O.pubs,
      O.window, O.flow);
    j_close();
}
static void drop_sessions(Client **cs, int n) { /* end the persistent sessions: a clean connect each */
    if (!O.clean_end) return;
    check_rx = NULL;
    disconnect_all(cs, n);
    for (int i = 0; i < n; i++) {
        cs[i]->clean = 1;
        cs[i]->nfilters = 0;
    }
    connect_all(cs, n);
    disconnect_all(cs, n);
}
/* offline: publisher p sends its k-th message to client (p + k) % n, as stream p * n + client: no two payloads are
 * equal, and one that comes to the wrong client is noticed. --shared: all clients have the one topic, stream p. */
static bool nm_off(Client *c, Msg *m) {
    int i = O.shared ? 0 : (int)((c->kind + c->sent) % (uint64_t)O.n);
    m->topic = topics[i];
    m->tlen = tlens[i];
    m->stream = O.shared ? (uint32_t)c->kind : (uint32_t)c->kind * O.n + i;
    m->seq = O.shared ? c->sent : c->sent / O.n;
    m->fan = O.shared ? O.n : 1;
    return true;
}
static bool cr_off(Client *c, const Hdr *h, const uint8_t *t, int tl, uint32_t *s, uint64_t *q) {
    int i = O.shared ? 0 : c->kind;
    *s = O.shared ? h->stream : h->stream / O.n;
    *q = h->seq;
    return (O.shared || (int)(h->stream % O.n) == c->kind) && tl == tlens[i] && !memcmp(t, topics[i], tl);
}
/* The end of a phase: its line is out; with --pause wait until somebody has looked at the broker, or replaced it. */
static void phase_over(void) {
    j_close();
    out_len = 0;
    if (!O.pause) return;
    char line[64];
    if (!fgets(line, sizeof line, stdin)) die("nobody answers on stdin");
    line[strcspn(line, "\n")] = 0;
    if (*line && O.bpids && !(O.bpids = strdup(line))) die("no memory");
}
/* Publish while every subscriber is away, then bring all back. Common to offline and vinfan --offline. */
static void away_and_back(int n, const char *name) {
    uint64_t t = now_ns();
    connect_all(all, n);
    disconnect_all(all, n);
    j_open(name);
    J(",\"phase\":\"asleep\",\"clients\":%d,\"secs\":%.3f", n, (now_ns() - t) / 1e9);
    phase_over();

    connect_all(all + n, nall - n);
    settle(O.settle);
    Snap a = snap(true);
    start_pubs();
    run_until_done(false);
    bool t1 = timed_out;
    double s = (t_last_ack > t_start ? t_last_ack - t_start : 1) / 1e9, wall = (now_ns() - t_start) / 1e9;
    Snap b = snap(true);
    disconnect_all(all + n, nall - n);
    j_open(name);
    J(",\"phase\":\"fill\",\"secs\":%.3f,\"acknowledged\":%lu,\"acknowledged_per_s\":%.0f,\"rate\":%.0f", s,
      acks, acks / s, expected / s * acks / (sent_total ? sent_total : 1));
    J(",\"queued\":%lu,\"pubs\":%d,\"window\":%d,\"shared\":%d,\"disconnects\":%lu,\"conn_fail\":%lu,"
      "\"unacked\":%lu,\"timed_out\":%s,\"rss_before_kb\":%ld",
      expected, npubs, O.window, O.shared, disconnects, conn_fail, inflight_total, timed_out ? "true" : "false",
      a.rss_kb);
    j_cost("", a, b, wall, expected);
    phase_over();

    settle(O.settle);
    sess_present = 0;
    Snap d = snap(false);
    t = t_progress = rx_now = now_ns();
    connect_all(all, n);
    double cs = (now_ns() - t) / 1e9;
    run_until_done(true);
    double dwall = (now_ns() - t) / 1e9, ds = (t_last_rx > t ? t_last_rx - t : 1) / 1e9;
    Snap e = snap(true);
    linger();
    timed_out |= t1;
    uint64_t once = dups, present = sess_present;
    if (O.again) { /* what was acknowledged must not come a second time */
        disconnect_all(all, n);
        connect_all(all, n);
        settle(1.0);
    }
    j_open(name);
    J(",\"left\":%lu", dups - once);
    dups = once;
    J(",\"phase\":\"drain\",\"secs\":%.3f,\"rate\":%.0f,\"reconnect_s\":%.3f,\"session_present\":%lu", ds,
      recv_unique / ds, cs, present);
    j_counts();
    j_cost("", d, e, dwall, recv_unique);
}
static void w_offline(void) {
    O.qos = 1;
    mk_topics(O.shared ? 1 : O.n, "%s/off/%d");
    O.msgs = O.shared ? O.per : (long)O.n * O.per;
    long each = (O.msgs + O.pubs - 1) / O.pubs;
    for (int i = 0; i < O.n; i++) {
        Client *c = mk("%s-o%d", O.tag, i);
        c->clean = 0;
        c->subqos = 1;
        c->kind = i;
        add_filter(c, topics[O.shared ? 0 : i]);
        track(c, O.pubs, O.shared ? each : (each + O.n - 1) / O.n);
    }
    for (int i = 0; i < O.pubs; i++) {
        Client *p = mk("%s-p%d", O.tag, i);
        p->is_pub = 1;
        p->kind = i;
        p->limit = each;
    }
    next_msg = nm_off;
    check_rx = cr_off;
    away_and_back(O.n, "offline");
    J(",\"clients\":%d,\"per\":%d,\"pubs\":%d,\"shared\":%d", O.n, O.per, O.pubs, O.shared);
    j_close();
    drop_sessions(all, O.n);
}
/* source: the same messages twice. live: a publisher to connected subscribers, on topics that nobody keeps (stream 0).
 * fill: to topics that are kept in a queue or stream (stream 1), QoS 1, so that the last PUBACK tells that all is stored.
 * drain: the subscribers come with --filter and get it from there. --shared: a message is for one of them (a queue; live:
 * a shared subscription, if there are several), so they have one record of what has arrived; else all get all. */
static void source_phase(const char *phase, Snap a, uint64_t since) {
    double wall = (now_ns() - since) / 1e9, secs = (t_last_rx > t_first_rx ? t_last_rx - t_first_rx : 1) / 1e9;
    Snap b = snap(true);
    linger();
    j_open("source");
    J(",\"phase\":\"%s\",\"secs\":%.4f,\"rate\":%.0f,\"first_s\":%.4f,\"subs\":%d,\"shared\":%d,\"window\":%d,\"flow\":%d",
      phase, secs, recv_unique / secs, t_first_rx > since ? (t_first_rx - since) / 1e9 : 0, O.n, O.shared, O.window,
      O.flow);
    j_counts();
    j_cost("", a, b, wall, recv_unique);
}
static void source_reset(void) {
    expected = recv_unique = dups = reordered = unexpected = acks = sent_total = 0;
    t_first_rx = t_last_rx = t_last_ack = 0;
    timed_out = false;
}
static void w_source(void) {
    char f[128];
    int qos = O.qos, n = O.n;
    if (!O.filter) die("source needs --filter");
    if (O.tpp > 1)
        mk_varied_topics(2, "source");
    else
        mk_topics(2, "%s/source/%d/x");
    snprintf(f, sizeof f, "%s%s/source/0/#", O.shared && n > 1 ? "$share/bench/" : "", O.tag);
    for (int i = 0; i < n; i++) {
        Client *c = mk("%s-s%d", O.tag, i);
        c->subqos = qos;
        add_filter(c, f);
        track(c, 2, O.msgs);
        if (O.shared) c->map = all[0]->map; /* what one of them has, no other may get */
    }
    Client *p = mk("%s-p", O.tag);
    p->is_pub = 1;
    p->limit = O.msgs;
    fan_const = O.shared ? 1 : n;
    if (O.flow) O.flow *= fan_const;
    next_msg = nm_stream;
    check_rx = cr_any;

    connect_all(all, nall);
    settle(O.settle);
    Snap a = snap(false);
    start_pubs();
    run_until_done(true);
    source_phase("live", a, t_start);
    phase_over();
    disconnect_all(all, nall);

    source_reset();
    O.qos = 1; /* whatever comes out of it: the PUBACK tells that it is stored */
    int flow = O.flow;
    O.flow = 0; /* nobody gets it now */
    p->kind = 1;
    p->sent = p->finished = 0;
    connect_all(&p, 1);
    settle(O.settle);
    a = snap(false);
    start_pubs();
    run_until_done(false);
    double s = (t_last_ack > t_start ? t_last_ack - t_start : 1) / 1e9, wall = (now_ns() - t_start) / 1e9;
    Snap b = snap(true);
    j_open("source");
    J(",\"phase\":\"fill\",\"secs\":%.3f,\"rate\":%.0f,\"sent\":%lu,\"acknowledged\":%lu,\"unacked\":%lu,"
      "\"disconnects\":%lu,\"conn_fail\":%lu,\"timed_out\":%s",
      s, acks / s, sent_total, acks, inflight_total, disconnects, conn_fail, timed_out ? "true" : "false");
    j_cost("", a, b, wall, acks);
    phase_over();
    disconnect_all(&p, 1);

    uint64_t want = expected, came_before = unexpected;
    source_reset();
    expected = want;
    unexpected = came_before;
    O.qos = qos;
    O.flow = flow;
    for (int i = 0; i < n; i++) all[i]->filters[0] = O.filter;
    settle(O.settle);
    a = snap(false);
    uint64_t t = t_progress = rx_now = now_ns();
    connect_all(all, n);
    run_until_done(true);
    source_phase("drain", a, t);
    j_close();
}
/* ecq: --pubs producers append to --n compacted queues; each has --per keys of its own in each of them. Producer p sends its
 * k-th message to queue (p + k) % n, as stream p * n + queue, so a stream is one producer's messages to one queue, in order,
 * and its last --per messages are those that the queue keeps.
 * append: nobody consumes. drain: the owners of the queues come, and must get just these. --mode append: without the drain.
 * --mode live: owners and producers at once; --per must be so large that no key comes twice, since a consumer that is a
 * little late would rightly miss the older value. */
static uint64_t ecq_count(int producer, int queue, uint64_t sent) { /* of the first `sent` messages, those to this queue */
    uint64_t first = ((uint64_t)queue + O.n - producer % O.n) % O.n;
    return sent > first ? (sent - first - 1) / O.n + 1 : 0;
}
static int ecq_topic(char *to, size_t room, const char *pre, int queue, int producer, uint64_t seq) {
    return snprintf(to, room, "$ECQ/%s%s-q%d/%d/%lu", pre, O.tag, queue, producer, seq % O.per);
}
static bool nm_ecq(Client *c, Msg *m) {
    static char topic[256];
    int q = (int)((c->kind + c->sent) % (uint64_t)O.n);
    m->seq = c->sent / O.n;
    m->stream = (uint32_t)c->kind * O.n + q;
    m->tlen = ecq_topic(topic, sizeof topic, "w/", q, c->kind, m->seq);
    m->topic = topic;
    m->fan = 1;
    return true;
}
static bool cr_ecq(Client *c, const Hdr *h, const uint8_t *t, int tl, uint32_t *s, uint64_t *q) {
    char topic[256];
    *s = h->stream / O.n;
    *q = h->seq;
    if ((int)(h->stream % O.n) != c->kind || *s >= (uint32_t)O.pubs) return false;
    int n = ecq_topic(topic, sizeof topic, "", c->kind, (int)*s, h->seq);
    return n == tl && !memcmp(t, topic, tl) && (running || h->seq + O.per >= ecq_count(*s, c->kind, c->limit));
}
static void w_ecq(void) {
    O.qos = 1;
    bool live = !strcmp(O.mode, "live"), stored = !strcmp(O.mode, "append");
    long each = (O.msgs + O.pubs - 1) / O.pubs;
    char f[128];
    if (live && O.per < (each + O.n - 1) / O.n) die("--mode live needs --per %ld", (each + O.n - 1) / O.n);
    for (int i = 0; i < O.n; i++) {
        Client *c = mk("%s-q%d", O.tag, i);
        c->subqos = 1;
        c->kind = i;
        c->limit = each;
        snprintf(f, sizeof f, "$ECQ/%s/#", c->cid);
        add_filter(c, f);
        if (!stored) track(c, O.pubs, (each + O.n - 1) / O.n);
    }
    for (int i = 0; i < O.pubs; i++) {
        Client *p = mk("%s-p%d", O.tag, i);
        p->is_pub = 1;
        p->kind = i;
        p->limit = each;
    }
    next_msg = nm_ecq;
    check_rx = cr_ecq;
    if (live)
        connect_all(all, nall);
    else
        connect_all(all + O.n, O.pubs);
    settle(O.settle);
    Snap a = snap(true);
    start_pubs();
    run_until_done(live);
    bool late = timed_out;
    uint64_t end = live && t_last_rx > t_last_ack ? t_last_rx : t_last_ack;
    double secs = (end > t_start ? end - t_start : 1) / 1e9, wall = (now_ns() - t_start) / 1e9;
    Snap b = snap(true);
    if (live) linger();
    j_open("ecq");
    J(",\"phase\":\"%s\",\"secs\":%.4f,\"rate\":%.0f,\"acknowledged\":%lu,\"queues\":%d,\"pubs\":%d,\"keys\":%d,"
      "\"window\":%d,\"rss_before_kb\":%ld",
      live ? "live" : "append", secs, acks / secs, acks, O.n, O.pubs, O.per, O.window, a.rss_kb);
    if (!live) expected = 0; /* of this phase: nobody was there */
    j_counts();
    if (live) j_lat();
    j_cost("", a, b, wall, acks);
    if (live || stored) {
        j_close();
        return;
    }
    phase_over();
    disconnect_all(all + O.n, O.pubs);

    source_reset();
    for (int i = 0; i < O.n; i++)
        for (int p = 0; p < O.pubs; p++) {
            uint64_t n = ecq_count(p, i, each);
            expected += n < (uint64_t)O.per ? n : (uint64_t)O.per;
        }
    settle(O.settle);
    a = snap(false);
    uint64_t t = t_progress = rx_now = now_ns();
    connect_all(all, O.n);
    run_until_done(true);
    timed_out |= late;
    wall = (now_ns() - t) / 1e9;
    secs = (t_last_rx > t ? t_last_rx - t : 1) / 1e9;
    b = snap(true);
    linger();
    j_open("ecq");
    J(",\"phase\":\"drain\",\"secs\":%.4f,\"rate\":%.0f,\"queues\":%d,\"pubs\":%d,\"keys\":%d", secs, recv_unique / secs,
      O.n, O.pubs, O.per);
    j_counts();
    j_cost("", a, b, wall, recv_unique);
    j_close();
}
/* vinfan: one payload to B batches of VINs, by one PUBLISH per VIN (loop) or one per batch (batch). */
static uint64_t vg;
static char *vjson;
static const char *RID = "task_ota_1";
static bool vbatch;
static const char B64[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
static size_t b64enc(char *o, const uint8_t *p, size_t n) {
    char *s = o;
    size_t i = 0;
    for (; i + 2 < n; i += 3) {
        uint32_t v = p[i] << 16 | p[i + 1] << 8 | p[i + 2];
        *o++ = B64[v >> 18];
        *o++ = B64[v >> 12 & 63];
        *o++ = B64[v >> 6 & 63];
        *o++ = B64[v & 63];
    }
    if (i < n) {
        uint32_t v = p[i] << 16 | (i + 1 < n ? p[i + 1] << 8 : 0);
        *o++ = B64[v >> 18];
        *o++ = B64[v >> 12 & 63];
        *o++ = i + 1 < n ? B64[v >> 6 & 63] : '=';
        *o++ = '=';
    }
    return o - s;
}
static bool nm_vin(Client *c, Msg *m) {
    (void)c;
    if (!vbatch) {
        int v = vg % O.n;
        m->topic = topics[v];
        m->tlen = tlens[v];
        m->stream = 0;
        m->seq = vg / O.perbatch;
        m->fan = 1;
        vg++;
        return true;
    }
    Hdr h = {MAGIC, 0, vg / O.perbatch, pump_ts};
    memcpy(payload, &h, HDR);
    char *w = vjson;
    w += sprintf(w, "{\"ids\":[");
    for (int k = 0; k < O.perbatch; k++) {
        if (k) *w++ = ',';
        *w++ = '"';
        memcpy(w, all[(vg + k) % O.n]->cid, 17);
        w += 17;
        *w++ = '"';
    }
    w += sprintf(w, "],\"request_id\":\"%s\",\"data\":\"", RID);
    w += b64enc(w, payload, O.size);
    w += sprintf(w, "\",\"encoding\":\"base64\"}");
    m->topic = O.batch_topic;
    m->tlen = strlen(O.batch_topic);
    m->body = (uint8_t *)vjson;
    m->blen = w - vjson;
    m->fan = O.perbatch;
    vg += O.perbatch;
    return true;
}
static bool cr_vin(Client *c, const Hdr *h, const uint8_t *t, int tl, uint32_t *s, uint64_t *q) {
    if (tl != tlens[c->idx] || memcmp(t, topics[c->idx], tl)) return false;
    long off = ((long)c->idx - (long)((h->seq * O.perbatch) % O.n) + O.n) % O.n;
    *s = 0;
    *q = h->seq;
    return off < O.perbatch;
}
static void w_vinfan(void) {
    O.qos = 1;
    char f[128];
    vbatch = !strcmp(O.mode, "batch");
    if (O.perbatch > O.n) die("--n must be at least --per-batch");
    vin_decode = true;
    long total = (long)O.batches * O.perbatch;
    vjson = xcalloc(1, O.perbatch * 20 + O.size * 4 / 3 + 256);
    topics = xcalloc(O.n, sizeof *topics);
    tlens = xcalloc(O.n, sizeof *tlens);
    for (int i = 0; i < O.n; i++) {
        Client *c = mk("LFV3A28K%09d", i);
        c->clean = !O.offline && !O.persistent;
        c->subqos = 1;
        snprintf(f, sizeof f, "agent/%s/proxy/request/+", c->cid);
        add_filter(c, f);
        track(c, 1, O.batches);
        tlens[i] = asprintf(&topics[i], "agent/%s/proxy/request/%s", c->cid, RID);
    }
    Client *p = mk("%s-platform", O.tag);
    p->is_pub = 1;
    p->limit = vbatch ? O.batches : total;
    next_msg = nm_vin;
    check_rx = cr_vin;
    if (O.offline) {
        away_and_back(O.n, "vinfan");
        J(",\"offline\":true");
    } else {
        connect_all(all, nall);
        settle(O.settle);
        Snap a = snap(false);
        start_pubs();
        run_until_done(true);
        double wall = (now_ns() - t_start) / 1e9;
        Snap b = snap(true);
        linger();
        double s = (t_last_rx > t_start ? t_last_rx - t_start : 1) / 1e9;
        j_open("vinfan");
        J(",\"offline\":false,\"last_delivery_s\":%.4f,\"deliveries_per_s\":%.0f,\"publisher_done_s\":%.4f",
          s, recv_unique / s, (t_last_ack > t_start ? t_last_ack - t_start : 0) / 1e9);
        j_counts();
        j_lat();
        j_cost("", a, b, wall, recv_unique);
    }
    J(",\"mode\":\"%s\",\"vehicles\":%d,\"batches\":%d,\"per_batch\":%d,\"publisher_bytes\":%lu,\"window\":%"
      "d",
      O.mode, O.n, O.batches, O.perbatch, pub_bytes, O.window);
    j_close();
    if (O.offline || O.persistent) drop_sessions(all, O.n);
}

int main(int argc, char **argv) {
    if (argc < 4)
        die("usage: mqttload conn|pair|fanout|fanin|rate|wild|offline|source|vinfan|ecq HOST PORT [--option value]...");
    const char *w = argv[1];
    signal(SIGPIPE, SIG_IGN);
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 4; i < argc; i++) {
        char *k = argv[i];
        if (!strcmp(k, "--offline")) {
            O.offline = 1;
            continue;
        }
        if (!strcmp(k, "--persistent")) {
            O.persistent = 1;
            continue;
        }
        if (!strcmp(k, "--shared")) {
            O.shared = 1;
            continue;
        }
        if (!strcmp(k, "--compressible")) {
            O.compressible = 1;
            continue;
        }
        if (!strcmp(k, "--again")) {
            O.again = 1;
            continue;
        }
        if (!strcmp(k, "--pause")) {
            O.pause = 1;
            continue;
        }
        if (!strcmp(k, "--no-spin")) {
            O.spin = 0;
            continue;
        }
        if (!strcmp(k, "--keep-sessions")) {
            O.clean_end = 0;
            continue;
        }
        if (!strcmp(k, "--sub")) {
            O.sub = 1;
            continue;
        }
        if (i + 1 >= argc) die("%s needs a value", k);
        char *v = argv[++i];
#define I(name, field) else if (!strcmp(k, name)) O.field = atoi(v)
#define D(name, field) else if (!strcmp(k, name)) O.field = atof(v)
#define S(name, field) else if (!strcmp(k, name)) O.field = v
        if (!strcmp(k, "--msgs")) O.msgs = (long)atof(v);
        I("--n", n);
        I("--pairs", pairs);
        I("--pubs", pubs);
        I("--subs", subs);
        I("--topics", topics);
        I("--qos", qos);
        I("--size", size);
        I("--window", window);
        I("--cwin", cwin);
        I("--per", per);
        I("--batches", batches);
        I("--per-batch", perbatch);
        I("--srcs", srcs);
        I("--keepalive", keepalive);
        I("--flow", flow);
        I("--topics-per-pair", tpp);
        I("--size-jitter", jitter);
        I("--shift", shift);
        D("--rate", rate);
        D("--secs", secs);
        D("--maxsec", maxsec);
        D("--idle", idle);
        D("--settle", settle);
        D("--hold", hold);
        S("--filter", filter);
        S("--mode", mode);
        S("--batch-topic", batch_topic);
        S("--tag", tag);
        S("--user", user);
        S("--pass", pass);
        S("--broker-pid", bpids);
        S("--ports", ports);
        else die("no such option: %s", k);
    }
    if (O.size < HDR) O.size = HDR;
    if (O.tpp < 1) die("--topics-per-pair must be at least 1");
    if (O.tpp > 1 && strcmp(w, "pair") && strcmp(w, "rate") && strcmp(w, "fanin") && strcmp(w, "source"))
        die("--topics-per-pair is for pair, rate, fanin and source");
    if (O.jitter < 0 || O.size - O.jitter < HDR) die("--size-jitter must leave %d bytes", HDR);
    if (!O.tag && asprintf(&O.tag, "b%d", (int)getpid()) < 0) die("no memory");
    if (!O.srcs) O.srcs = O.n / 20000 + 1;
    struct rlimit rl;
    getrlimit(RLIMIT_NOFILE, &rl);
    rlim_t need = (rlim_t)O.n + 256, want = (rlim_t)O.n + 4096;
    if (rl.rlim_cur < want) {
        struct rlimit more = {want, rl.rlim_max < want ? want : rl.rlim_max};
        if (setrlimit(RLIMIT_NOFILE, &more)) {
            if (rl.rlim_max < need) die("%d open files are needed and %d allowed", (int)need, (int)rl.rlim_max);
            rl.rlim_cur = rl.rlim_max;
            if (setrlimit(RLIMIT_NOFILE, &rl)) die("setrlimit: %s", strerror(errno));
        }
    }
    dst.sin_family = AF_INET;
    dst.sin_port = htons(atoi(argv[3]));
    if (inet_pton(AF_INET, argv[2], &dst.sin_addr) != 1) {
        struct hostent *h = gethostbyname(argv[2]);
        if (!h || h->h_addrtype != AF_INET) die("no such host: %s", argv[2]);
        memcpy(&dst.sin_addr, h->h_addr, 4);
    }
    for (char *q = O.ports; q && *q; q += *q == ',') {
        if (nports == 64) die("--ports: 64 at the most");
        ports[nports++] = htons(strtol(q, &q, 10));
        if (*q && *q != ',') die("--ports: numbers with commas between them");
    }
    bool stores = !strcmp(w, "offline") || !strcmp(w, "source") || !strcmp(w, "ecq");
    if (stores && !O.compressible) pool = 1 << 20;
    payload = xcalloc(1, O.size + O.jitter + HDR + pool);
    uint32_t x = 2463534242u;
    for (size_t i = HDR; i < O.size + O.jitter + pool; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        payload[i] = 'a' + x % 26;
    }
    ep = epoll_create1(EPOLL_CLOEXEC);
    rx_now = now_ns();
    if (!strcmp(w, "conn"))
        w_conn();
    else if (!strcmp(w, "pair"))
        w_pair(false);
    else if (!strcmp(w, "rate"))
        w_pair(true);
    else if (!strcmp(w, "fanout"))
        w_fanout();
    else if (!strcmp(w, "fanin"))
        w_fanin();
    else if (!strcmp(w, "wild"))
        w_wild();
    else if (!strcmp(w, "offline"))
        w_offline();
    else if (!strcmp(w, "source"))
        w_source();
    else if (!strcmp(w, "vinfan"))
        w_vinfan();
    else if (!strcmp(w, "ecq"))
        w_ecq();
    else
        die("no such workload: %s", w);
    disconnect_all(all, nall);
    return 0;
}
