//! Names, numbers and words that would be something else elsewhere.

use serde_json::{Value, json};

use super::Stop::{Describe, Discover, Grant};
use super::{Case, case, small};

const REFUSED: &str = "driver-answer-not-valid";

fn pools(pools: Value) -> Vec<u8> {
    small().has(pools).module()
}

fn device(device: Value) -> Vec<u8> {
    pools(json!([{"name": "p", "devices": [device]}]))
}

fn describes(changes: Value) -> Vec<u8> {
    small().describes(changes).module()
}

pub(super) fn cases() -> Vec<Case> {
    [devices(), words(), amounts(), itself(), wishes()].into_iter().flatten().collect()
}

fn devices() -> Vec<Case> {
    vec![
        case(
            "device-with-a-slash",
            "a device whose name is a path",
            || device(json!({"name": "../../etc/cron.d/x"})),
            (Discover, REFUSED, "device name \"../../etc/cron.d/x\""),
        ),
        case(
            "device-with-a-newline",
            "a device whose name has a second line",
            || device(json!({"name": "d\ndevices: []"})),
            (Discover, REFUSED, "device name \"d\\ndevices"),
        ),
        case(
            "device-with-cdi-signs",
            "a device whose name ends a CDI name and begins another",
            || device(json!({"name": "d,vendor.com/class=all"})),
            (Discover, REFUSED, "device name"),
        ),
        case(
            "device-of-10000-letters",
            "a device with a name of ten thousand letters",
            || device(json!({"name": {"$times": [10_000, "d"]}})),
            (Discover, REFUSED, "dddd…"),
        ),
        case(
            "device-look-alike",
            "a device whose name only looks like another's",
            || device(json!({"name": "gpu-\u{430}"})),
            (Discover, REFUSED, "device name"),
        ),
        case(
            "device-empty",
            "a device without a name",
            || device(json!({})),
            (Discover, REFUSED, "device name \"\""),
        ),
        case(
            "device-name-twice",
            "two devices of one name",
            || pools(json!([{"name": "p", "devices": [{"name": "d"}, {"name": "d"}]}])),
            (Discover, REFUSED, "device d occurs twice"),
        ),
        case(
            "pool-is-a-path",
            "a pool whose name leads upwards",
            || pools(json!([{"name": "../../etc"}])),
            (Discover, REFUSED, "pool name"),
        ),
        case(
            "pool-twice",
            "two pools of one name",
            || pools(json!([{"name": "p"}, {"name": "p"}])),
            (Discover, REFUSED, "pool p occurs twice"),
        ),
        case(
            "resource-of-kubernetes",
            "offers its devices as CPUs of the node",
            || pools(json!([{"name": "p", "extended-resource": "kubernetes.io/cpu"}])),
            (Discover, REFUSED, "extended resource"),
        ),
    ]
}

fn words() -> Vec<Case> {
    vec![
        case(
            "attribute-twice",
            "an attribute under both of its names",
            || device(json!({"name": "d", "attributes": [{"name": "a"}, {"name": "tiny.example.com/a"}]})),
            (Discover, REFUSED, "occurs twice"),
        ),
        case(
            "attribute-name",
            "an attribute whose name is an expression",
            || device(json!({"name": "d", "attributes": [{"name": "a || true"}]})),
            (Discover, REFUSED, "attribute"),
        ),
        case(
            "attribute-with-escapes",
            "an attribute that writes to the terminal",
            || {
                device(
                    json!({"name": "d", "attributes": [{"name": "a", "value": {"text": "\u{1b}]0;x\u{7}"}}]}),
                )
            },
            (Discover, REFUSED, "control character"),
        ),
        case(
            "attribute-turns-round",
            "an attribute that turns the rest of the line round",
            || device(json!({"name": "d", "attributes": [{"name": "a", "value": {"text": "safe\u{202e}"}}]})),
            (Discover, REFUSED, "control character"),
        ),
        case(
            "attribute-version",
            "a version that is none",
            || device(json!({"name": "d", "attributes": [{"name": "a", "value": {"version": "latest"}}]})),
            (Discover, REFUSED, "semantic version"),
        ),
        case(
            "taint-with-a-newline",
            "a taint whose key has a second line",
            || device(json!({"name": "d", "taints": [{"key": "a\nb"}]})),
            (Discover, REFUSED, "taint key"),
        ),
        case(
            "identity-with-a-newline",
            "hardware that is called by two lines",
            || device(json!({"name": "d", "identity": ["pci:0\npci:1"]})),
            (Discover, REFUSED, "control character"),
        ),
        case(
            "annotation-key",
            "an annotation without a name",
            || device(json!({"name": "d", "annotations": [["", "x"]]})),
            (Discover, REFUSED, "is empty"),
        ),
    ]
}

fn amounts() -> Vec<Case> {
    fn capacity(value: &str) -> Vec<u8> {
        device(json!({"name": "d", "capacities": [{"name": "memory", "value": value}]}))
    }
    vec![
        case(
            "quantity-negative",
            "a device of -1 bytes",
            || capacity("-1"),
            (Discover, REFUSED, "not a quantity"),
        ),
        case(
            "quantity-expression",
            "a device of 1+1 bytes",
            || capacity("1+1"),
            (Discover, REFUSED, "not a quantity"),
        ),
        case(
            "quantity-endless",
            "a device of 10^99999 bytes",
            || capacity("1e99999"),
            (Discover, REFUSED, "not a quantity"),
        ),
        case(
            "policy-alone",
            "shares of a device that nobody may share",
            || device(json!({"name": "d", "capacities": [{"name": "m", "value": "1", "policy": {}}]})),
            (Discover, REFUSED, "several allocations"),
        ),
        case(
            "policy-of-nothing",
            "shares between two amounts that are none",
            || {
                device(json!({"name": "d", "allow-multiple-allocations": true, "capacities":
                [{"name": "m", "value": "1", "policy": {"choice": {"range": {"min": "NaN"}}}}]}))
            },
            (Discover, REFUSED, "the least amount \"NaN\""),
        ),
        case(
            "counter-set-undeclared",
            "takes from a counter set that the pool has not",
            || device(json!({"name": "d", "consumes": [{"name": "c"}]})),
            (Discover, REFUSED, "which the pool has not"),
        ),
        case(
            "counter-undeclared",
            "takes from a counter that the set has not",
            || {
                pools(json!([{"name": "p", "shared-counters": [{"name": "c"}], "devices":
                [{"name": "d", "consumes": [{"name": "c", "counters": [{"name": "x", "value": "1"}]}]}]}]))
            },
            (Discover, REFUSED, "consumes counter x"),
        ),
    ]
}

fn itself() -> Vec<Case> {
    const REFUSED: &str = "description-refused";
    vec![
        case(
            "driver-is-a-path",
            "is called by a path",
            || describes(json!({"name": "../../../root/.ssh"})),
            (Describe, REFUSED, "driver name"),
        ),
        case(
            "driver-without-a-name",
            "has no name",
            || describes(json!({"name": ""})),
            (Describe, REFUSED, "driver name \"\""),
        ),
        case(
            "driver-of-a-million-letters",
            "has a name of a million letters",
            || describes(json!({"name": {"$times": [1_000_000, "a"]}})),
            (Describe, REFUSED, "aaaa…"),
        ),
        case(
            "driver-look-alike",
            "has a name that only looks like another driver's",
            || describes(json!({"name": "gpu.ex\u{430}mple.com"})),
            (Describe, REFUSED, "driver name"),
        ),
        case(
            "version-latest",
            "has a version that is none",
            || describes(json!({"version": "latest"})),
            (Describe, REFUSED, "\"latest\" is not a semantic version"),
        ),
        case(
            "version-with-a-line",
            "has a version with a second line",
            || describes(json!({"version": "1.2.3\nState: serving"})),
            (Describe, REFUSED, "is not a semantic version"),
        ),
        case(
            "summary-with-escapes",
            "paints the operator's terminal",
            || describes(json!({"summary": "\u{1b}[31mred"})),
            (Describe, REFUSED, "control character"),
        ),
        case(
            "subsystem-is-a-path",
            "wants the events of a path",
            || describes(json!({"event-subsystems": ["../net"]})),
            (Describe, REFUSED, "event subsystem"),
        ),
        case(
            "annotations-many",
            "says a thousand things of itself",
            || describes(json!({"annotations": {"$times": [1000, ["k", "v"]]}})),
            (Describe, REFUSED, "1000 annotations, at most 16"),
        ),
    ]
}

fn wishes() -> Vec<Case> {
    const REFUSED: &str = "description-refused";
    fn asks(capabilities: Value) -> Vec<u8> {
        small().asks(capabilities).module()
    }
    vec![
        case(
            "asks-for-all",
            "asks for everything there is",
            || {
                asks(
                    json!({"sysfs-read": ["**"], "sysfs-write": [{"glob": "**", "pattern": ".*"}], "device-nodes": ["/dev/**"],
                "mounts": ["/**"], "hooks": ["/bin/sh"], "env": ["*"], "net-devices": ["*"]}),
                )
            },
            (Grant, "blocked", "hooks: /bin/sh"),
        ),
        case(
            "asks-for-time",
            "asks for all the memory and time of the node",
            || {
                describes(
                    json!({"limits": {"memory-mib": u32::MAX, "wall-ms": u32::MAX, "cpu-ms": u32::MAX}}),
                )
            },
            (Grant, "blocked", "limits.memoryMiB: 4294967295"),
        ),
        case(
            "asks-for-the-loader",
            "asks for LD_PRELOAD where all names are granted",
            || asks(json!({"env": ["LD_PRELOAD"]})),
            (Grant, "blocked", "env: LD_PRELOAD"),
        )
        .granted("env: [\"*\"]"),
        case(
            "asks-too-often",
            "asks for a thousand names",
            || asks(json!({"env": {"$times": [1000, "A"]}})),
            (Describe, REFUSED, "env has 1000 entries, at most 64"),
        ),
        case(
            "asks-by-a-way-up",
            "asks for what is above /sys",
            || asks(json!({"sysfs-read": ["class/../../etc"]})),
            (Describe, REFUSED, "is not a glob"),
        ),
        case(
            "asks-with-a-line",
            "asks for a path with a second line",
            || asks(json!({"mounts": ["/opt/a\n/etc"]})),
            (Describe, REFUSED, "control character"),
        ),
        case(
            "asks-by-a-huge-pattern",
            "a pattern on values that takes gigabytes once it is compiled",
            || asks(json!({"sysfs-write": [{"glob": "a", "pattern": "((\\w{100}){100}){100}"}]})),
            (Describe, REFUSED, "is not a regular expression"),
        ),
        case(
            "asks-by-open-brackets",
            "a pattern on values that would end its own bounds",
            || asks(json!({"sysfs-write": [{"glob": "a", "pattern": "1)|(?:.*"}]})),
            (Describe, REFUSED, "is not a regular expression"),
        ),
    ]
}
