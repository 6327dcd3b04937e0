// The nodes of the driver, and texts for the host.

#pragma once

#include <stdlib.h>
#include <string.h>

#include "bindings/driver.h"

typedef driver_string_t text_t;

static const char POOL[] = "nodes";
static const struct {
  const char *path, *device, *variable, *identity;
} NODES[] = {
    {"/dev/fuse", "fuse", "MY_GPU_FUSE", "dev:/dev/fuse"},
    {"/dev/net/tun", "net-tun", "MY_GPU_NET_TUN", "dev:/dev/net/tun"},
};
enum { COUNT = sizeof NODES / sizeof *NODES };

// Returns zeroed memory. Without any left the instance ends here, and the host reports that the driver reached its limit.
static inline void *zeroed(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) __builtin_trap();
  return memory;
}

// Text for arguments, never for a result.
static inline text_t view(const char *chars) { return (text_t){(uint8_t *)chars, strlen(chars)}; }

static inline text_t copy(text_t text) {
  text_t copied = {zeroed(text.len, 1), text.len};
  memcpy(copied.ptr, text.ptr, text.len);
  return copied;
}

static inline text_t owned(const char *chars) { return copy(view(chars)); }

static inline driver_list_string_t one_text(const char *chars) {
  text_t *text = zeroed(1, sizeof *text);
  *text = owned(chars);
  return (driver_list_string_t){text, 1};
}
