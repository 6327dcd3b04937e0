// Two slots as devices: the example driver of Nodedock in C.
//
// Every call runs in a fresh instance of this program. Variables do not keep their value until the next call: state that must
// persist goes into the memo of a claim. Nothing is freed here either: the whole memory ends with the instance. Each part of a
// result must be allocated separately, since the bindings free it after the host has read it.

#include <stdlib.h>
#include <string.h>

#include "bindings/driver.h"

typedef driver_string_t text_t;
typedef nodedock_driver_claims_allocated_device_t allocated_t;
typedef nodedock_driver_inventory_attribute_t attribute_t;
typedef nodedock_driver_claims_claim_t claim_t;
typedef nodedock_driver_inventory_device_t device_t;
typedef nodedock_driver_container_edits_container_edits_t edits_t;
typedef nodedock_driver_common_key_value_t key_value_t;
typedef nodedock_driver_common_list_key_value_t key_values_t;
typedef nodedock_driver_claims_claim_record_t claim_record_t;
typedef nodedock_driver_claims_opaque_parameters_t parameters_t;
typedef nodedock_driver_inventory_pool_t pool_t;
typedef nodedock_driver_claims_prepared_claim_t prepared_claim_t;
typedef nodedock_driver_claims_prepared_device_t prepared_device_t;
typedef nodedock_driver_claims_prepare_outcome_t prepare_outcome_t;
typedef nodedock_driver_common_problem_t problem_t;
typedef nodedock_driver_claims_unprepare_outcome_t unprepare_outcome_t;

enum { SLOTS = 2, MODES = 2 };

static const char POOL[] = "slots";
static const char *const SLOT_NAMES[SLOTS] = {"slot-0", "slot-1"};
static const char *const SLOT_VARIABLES[SLOTS] = {"GOLDEN_SLOT_0", "GOLDEN_SLOT_1"};
static const char *const MODE_NAMES[MODES] = {"normal", "quiet"};
static const char CPUS[] = "devices/system/cpu/online";

// ---- Memory and texts ----

// Returns zeroed memory. Without any left the instance ends here, and the host reports that the driver reached its limit.
static void *zeroed(size_t count, size_t size) {
  void *memory = calloc(count ? count : 1, size);
  if (!memory) __builtin_trap();
  return memory;
}

// Text for arguments, never for a result.
static text_t view(const char *chars) { return (text_t){(uint8_t *)chars, strlen(chars)}; }

static text_t copy(text_t text) {
  text_t copied = {zeroed(text.len, 1), text.len};
  memcpy(copied.ptr, text.ptr, text.len);
  return copied;
}

static text_t owned(const char *chars) { return copy(view(chars)); }

static text_t joined(const text_t *parts, size_t count) {
  text_t all = {NULL, 0};
  for (size_t i = 0; i < count; i++) all.len += parts[i].len;
  all.ptr = zeroed(all.len, 1);
  size_t at = 0;
  for (size_t i = 0; i < count; at += parts[i++].len) memcpy(all.ptr + at, parts[i].ptr, parts[i].len);
  return all;
}

static bool same(text_t left, text_t right) {
  return left.len == right.len && memcmp(left.ptr, right.ptr, left.len) == 0;
}

// Returns the index of a name in a list, or -1.
static int find(const char *const names[], int count, text_t name) {
  for (int i = 0; i < count; i++)
    if (same(view(names[i]), name)) return i;
  return -1;
}

static driver_list_string_t one_text(const char *chars) {
  text_t *text = zeroed(1, sizeof *text);
  *text = owned(chars);
  return (driver_list_string_t){text, 1};
}

static key_values_t one_key_value(const char *key, text_t value) {
  key_value_t *pair = zeroed(1, sizeof *pair);
  *pair = (key_value_t){owned(key), copy(value)};
  return (key_values_t){pair, 1};
}

static text_t decimal(size_t number) {
  char digits[24], *at = digits + sizeof digits;
  *--at = '\0';
  do *--at = (char)('0' + number % 10);
  while (number /= 10);
  return owned(at);
}

static void say(const char *message, key_value_t *fields, size_t count) {
  text_t text = view(message);
  nodedock_driver_log_list_key_value_t list = {fields, count};
  nodedock_driver_log_write(NODEDOCK_DRIVER_LOG_LEVEL_INFO, &text, &list);
}

// Counts the prepared claims over all pages.
static size_t count_prepared(void) {
  nodedock_driver_prepared_claims_page_t page;
  size_t count = 0;
  nodedock_driver_prepared_claims_all(NULL, &page);
  for (;;) {
    count += page.claims.len;
    if (!page.next.is_some) return count;
    text_t after = page.next.val;
    nodedock_driver_prepared_claims_all(&after, &page);
  }
}

static problem_t problem(nodedock_driver_common_problem_kind_t kind, const char *code, text_t message) {
  return (problem_t){.kind = kind, .code = owned(code), .message = message};
}

// A permanent refusal: the host does not retry until the claim changes.
static problem_t invalid(const char *code, text_t message) {
  return problem(NODEDOCK_DRIVER_COMMON_PROBLEM_KIND_INVALID, code, message);
}

// ---- Parameters: {} or {"mode": "quiet"} ----

typedef struct {
  const uint8_t *at, *end;
} reader_t;

static bool take(reader_t *reader, char wanted) {
  while (reader->at < reader->end && memchr(" \t\r\n", *reader->at, 4)) reader->at++;
  if (reader->at == reader->end || *reader->at != wanted) return false;
  reader->at++;
  return true;
}

// Parses a JSON string without escapes: neither the key nor any mode needs one.
static bool take_text(reader_t *reader, text_t *text) {
  if (!take(reader, '"')) return false;
  const uint8_t *begin = reader->at;
  for (; reader->at < reader->end && *reader->at != '"'; reader->at++)
    if (*reader->at == '\\' || *reader->at < ' ') return false;
  *text = (text_t){(uint8_t *)begin, (size_t)(reader->at - begin)};
  return take(reader, '"');
}

static bool take_end(reader_t *reader) {
  bool closed = take(reader, '}');
  // Skips trailing white space; nothing else may follow.
  return closed && !take(reader, '}') && reader->at == reader->end;
}

// Returns false for invalid parameters. The mode is unchanged if the parameters have none.
static bool read_mode(text_t parameters, text_t *mode) {
  reader_t reader = {parameters.ptr, parameters.ptr + parameters.len};
  text_t key;
  if (!take(&reader, '{')) return false;
  if (!take_text(&reader, &key)) return take_end(&reader);
  return same(key, view("mode")) && take(&reader, ':') && take_text(&reader, mode) && take_end(&reader);
}

// ---- describe and discover ----

void exports_nodedock_driver_identity_describe(exports_nodedock_driver_identity_driver_info_t *info) {
  *info = (exports_nodedock_driver_identity_driver_info_t){
      .name = owned("golden.nodedock.dev"),
      .version = owned("0.1.0"),
      .summary = owned("Two slots, the same driver in every language"),
      .capabilities = {.sysfs_read = one_text(CPUS), .env = one_text("GOLDEN_*")},
  };
  key_values_t language = one_key_value("language", view("c"));
  info->annotations = (exports_nodedock_driver_identity_list_key_value_t){language.ptr, language.len};
}

static device_t slot(int index, text_t cpus) {
  const attribute_t all[] = {
      {owned("index"), {NODEDOCK_DRIVER_INVENTORY_ATTRIBUTE_VALUE_INT, {.int_ = index}}},
      {owned("model"), {NODEDOCK_DRIVER_INVENTORY_ATTRIBUTE_VALUE_TEXT, {.text = owned("Golden Slot")}}},
      {owned("firmware"), {NODEDOCK_DRIVER_INVENTORY_ATTRIBUTE_VALUE_VERSION, {.version = owned("1.2.0")}}},
      {owned("spare"), {NODEDOCK_DRIVER_INVENTORY_ATTRIBUTE_VALUE_BOOLEAN, {.boolean = index > 0}}},
      {owned("cpus"), {NODEDOCK_DRIVER_INVENTORY_ATTRIBUTE_VALUE_TEXT, {.text = copy(cpus)}}},
  };
  device_t device = {.name = owned(SLOT_NAMES[index]), .allow_multiple_allocations = true};
  device.attributes.len = sizeof all / sizeof *all;
  device.attributes.ptr = zeroed(device.attributes.len, sizeof *all);
  memcpy(device.attributes.ptr, all, sizeof all);
  return device;
}

bool exports_nodedock_driver_discovery_discover(exports_nodedock_driver_discovery_context_t *context,
                                                exports_nodedock_driver_discovery_trigger_t *trigger,
                                                exports_nodedock_driver_discovery_inventory_t *inventory,
                                                exports_nodedock_driver_discovery_problem_t *refusal) {
  (void)context, (void)trigger;
  text_t path = view(CPUS), cpus;
  // Returns the host's problem for a file that is not granted or does not exist.
  if (!nodedock_driver_sysfs_read(&path, &cpus, refusal)) return false;
  key_value_t fields[] = {{view("devices"), decimal(SLOTS)}, {view("claims"), decimal(count_prepared())}};
  say("discovered", fields, 2);

  pool_t *pool = zeroed(1, sizeof *pool);
  *pool = (pool_t){.name = owned(POOL), .devices = {zeroed(SLOTS, sizeof(device_t)), SLOTS}};
  for (int i = 0; i < SLOTS; i++) pool->devices.ptr[i] = slot(i, cpus);
  inventory->pools.ptr = pool;
  inventory->pools.len = 1;
  return true;
}

// ---- prepare ----

// Returns the request without the subrequest of a prioritised list.
static text_t base_request(text_t request) {
  const uint8_t *slash = memchr(request.ptr, '/', request.len);
  return (text_t){request.ptr, slash ? (size_t)(slash - request.ptr) : request.len};
}

static bool applies(const parameters_t *parameters, text_t request) {
  for (size_t i = 0; i < parameters->requests.len; i++) {
    text_t named = parameters->requests.ptr[i];
    if (same(named, request) || same(named, base_request(request))) return true;
  }
  return parameters->requests.len == 0;
}

// Applies the last of the parameters for this device: those of the claim come after those of its class. Returns false with a refusal.
static bool choose(const claim_t *claim, const allocated_t *allocated, int *slot, int *mode, problem_t *refusal) {
  *slot = same(allocated->pool, view(POOL)) ? find(SLOT_NAMES, SLOTS, allocated->device) : -1;
  if (*slot < 0) {
    text_t parts[] = {view("there is no "), allocated->pool, view("/"), allocated->device};
    *refusal = problem(NODEDOCK_DRIVER_COMMON_PROBLEM_KIND_NOT_FOUND, "no-such-device", joined(parts, 4));
    return false;
  }
  const parameters_t *last = NULL;
  for (size_t i = 0; i < claim->parameters.len; i++)
    if (applies(&claim->parameters.ptr[i], allocated->request)) last = &claim->parameters.ptr[i];
  text_t name = view(MODE_NAMES[0]);
  if (last && !read_mode(last->parameters, &name)) {
    *refusal = invalid("bad-parameters", owned("the parameters are not an object with nothing but a text \"mode\""));
    return false;
  }
  *mode = find(MODE_NAMES, MODES, name);
  if (*mode < 0) {
    text_t parts[] = {view("mode \""), name, view("\" is not one of normal, quiet")};
    *refusal = invalid("no-such-mode", joined(parts, 3));
    return false;
  }
  return true;
}

static prepared_device_t ready(const allocated_t *allocated, int slot, int mode) {
  key_values_t env = one_key_value(SLOT_VARIABLES[slot], view(MODE_NAMES[mode]));
  prepared_device_t device = {
      .requests = {zeroed(1, sizeof(text_t)), 1},
      .pool = copy(allocated->pool),
      .device = copy(allocated->device),
      .share_id = allocated->share_id,
      .edits = {.env = {env.ptr, env.len}},
  };
  device.requests.ptr[0] = copy(base_request(allocated->request));
  if (device.share_id.is_some) device.share_id.val = copy(device.share_id.val);
  return device;
}

// Returns false if the claim is prepared with another memo.
static bool is_as_before(const claim_t *claim, text_t memo) {
  claim_record_t before;
  text_t uid = claim->id.uid;
  if (!nodedock_driver_prepared_claims_get(&uid, &before)) return true;
  return !before.prepared || same((text_t){before.memo.ptr, before.memo.len}, memo);
}

// Returns false with a refusal.
static bool prepare(const claim_t *claim, prepared_claim_t *prepared, problem_t *refusal) {
  size_t count = claim->devices.len;
  text_t memo = view("");
  *prepared = (prepared_claim_t){.devices = {zeroed(count, sizeof(prepared_device_t)), count}};
  for (size_t i = 0; i < count; i++) {
    int slot, mode;
    if (!choose(claim, &claim->devices.ptr[i], &slot, &mode, refusal)) return false;
    prepared->devices.ptr[i] = ready(&claim->devices.ptr[i], slot, mode);
    text_t parts[] = {memo, view(SLOT_NAMES[slot]), view(" "), view(MODE_NAMES[mode]), view("\n")};
    memo = joined(parts, 5);
  }
  if (!is_as_before(claim, memo)) {
    *refusal = invalid("prepared-otherwise", owned("the claim is prepared with other devices or modes"));
    return false;
  }
  key_value_t field = {view("claim"), claim->id.name};
  say("prepared", &field, 1);
  prepared->memo = (driver_list_u8_t){memo.ptr, memo.len};
  return true;
}

void exports_nodedock_driver_preparation_prepare(exports_nodedock_driver_preparation_context_t *context,
                                                 exports_nodedock_driver_preparation_list_claim_t *claims,
                                                 exports_nodedock_driver_preparation_list_prepare_outcome_t *outcomes) {
  (void)context;
  outcomes->len = claims->len;
  outcomes->ptr = zeroed(claims->len, sizeof(prepare_outcome_t));
  for (size_t i = 0; i < claims->len; i++) {
    prepare_outcome_t *answer = &outcomes->ptr[i];
    prepared_claim_t prepared;
    problem_t refusal;
    answer->uid = copy(claims->ptr[i].id.uid);
    answer->outcome.is_err = !prepare(&claims->ptr[i], &prepared, &refusal);
    if (answer->outcome.is_err) answer->outcome.val.err = refusal;
    else answer->outcome.val.ok = prepared;
  }
}

// ---- unprepare ----

// Returns whether each line of the memo is a slot and a mode. A claim whose prepare did not complete has no memo and nothing to
// unprepare.
static bool is_ours(driver_list_u8_t memo) {
  const uint8_t *at = memo.ptr, *end = memo.ptr + memo.len;
  while (at < end) {
    const uint8_t *line_end = memchr(at, '\n', (size_t)(end - at));
    if (!line_end) line_end = end;
    const uint8_t *blank = memchr(at, ' ', (size_t)(line_end - at));
    if (!blank || find(SLOT_NAMES, SLOTS, (text_t){(uint8_t *)at, (size_t)(blank - at)}) < 0) return false;
    if (find(MODE_NAMES, MODES, (text_t){(uint8_t *)blank + 1, (size_t)(line_end - blank - 1)}) < 0) return false;
    at = line_end + 1;
  }
  return true;
}

void exports_nodedock_driver_preparation_unprepare(
    exports_nodedock_driver_preparation_context_t *context, exports_nodedock_driver_preparation_list_claim_record_t *claims,
    exports_nodedock_driver_preparation_list_unprepare_outcome_t *outcomes) {
  (void)context;
  outcomes->len = claims->len;
  outcomes->ptr = zeroed(claims->len, sizeof(unprepare_outcome_t));
  for (size_t i = 0; i < claims->len; i++) {
    claim_record_t *record = &claims->ptr[i];
    unprepare_outcome_t *answer = &outcomes->ptr[i];
    answer->uid = copy(record->claim.id.uid);
    answer->outcome.is_err = !is_ours(record->memo);
    if (answer->outcome.is_err) {
      text_t message = owned("the memo is not one that this driver writes");
      answer->outcome.val.err = problem(NODEDOCK_DRIVER_COMMON_PROBLEM_KIND_INTERNAL, "bad-memo", message);
      continue;
    }
    key_value_t field = {view("claim"), record->claim.id.name};
    say("unprepared", &field, 1);
  }
}
