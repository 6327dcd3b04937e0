//! Edits of containers that reach for the node.

use serde_json::{Value, json};

use super::Stop::{Harmless, Prepare};
use super::{Case, case, small};

const DENIED: &str = "edit-denied";
const INVALID: &str = "edit-invalid";
const REFUSED: &str = "driver-answer-not-valid";

/// What an operator of little care grants.
const ALL: &str =
    "deviceNodes: [\"/dev/**\"]\nmounts: [\"/**\"]\nenv: [\"*\"]\nnetDevices: [\"*\"]\nhooks: [/bin/true]";

/// A driver that asks for all of that, and wants these edits.
fn edits(edits: Value) -> Vec<u8> {
    claim(json!({"edits": edits}))
}

fn claim(claim: Value) -> Vec<u8> {
    let asked = json!({"device-nodes": ["/dev/**"], "mounts": ["/**"], "env": ["*"], "net-devices": ["*"], "hooks": ["/bin/true"]});
    small().asks(asked).prepares(claim).module()
}

fn mount(host: &str, container: &str, options: &[&str]) -> Vec<u8> {
    edits(json!({"mounts": [{"host-path": host, "container-path": container, "options": options}]}))
}

fn node(node: Value) -> Vec<u8> {
    edits(json!({"device-nodes": [node]}))
}

fn env(name: &str, value: &str) -> Vec<u8> {
    edits(json!({"env": [[name, value]]}))
}

pub(super) fn cases() -> Vec<Case> {
    let all = [nodes(), mounts(), variables(), programs(), others()].into_iter().flatten();
    all.map(|case| case.granted(ALL)).collect()
}

fn nodes() -> Vec<Case> {
    vec![
        case(
            "node-mem",
            "wants the machine's memory",
            || node(json!({"path": "/dev/mem", "permissions": "rw"})),
            (Prepare, "never-allowed", "/dev/mem"),
        ),
        case(
            "node-mem-renamed",
            "wants the machine's memory under another name in the container",
            || node(json!({"path": "/dev/null", "host-path": "/dev/mem", "permissions": "rw"})),
            (Prepare, "never-allowed", "/dev/mem"),
        ),
        case(
            "node-outside",
            "wants a file of the node as a device",
            || node(json!({"path": "/etc/shadow", "permissions": "r"})),
            (Prepare, DENIED, "/etc/shadow"),
        ),
        case(
            "node-by-a-way-up",
            "wants a file of the node by a way up from /dev",
            || node(json!({"path": "/dev/../etc/shadow", "permissions": "r"})),
            (Prepare, REFUSED, "not an absolute, plain path"),
        ),
        case(
            "node-with-a-line",
            "a path with a second line",
            || node(json!({"path": "/dev/a\n/dev/b", "permissions": "r"})),
            (Prepare, REFUSED, "control character"),
        ),
        case(
            "node-link",
            "wants what a link in /dev points to",
            || node(json!({"path": "/dev/fd/0", "permissions": "r"})),
            (Prepare, "not-a-node", "behind a link"),
        ),
        case(
            "node-lies",
            "calls a pipe a disk",
            || node(json!({"path": "/dev/pipe", "kind": "block", "permissions": "r"})),
            (Prepare, INVALID, "the driver says block"),
        ),
        case(
            "node-mode",
            "a node that runs with its owner's rights",
            || node(json!({"path": "/dev/pipe", "permissions": "r", "file-mode": 0o4777})),
            (Prepare, REFUSED, "file mode 4777"),
        ),
        case(
            "node-permissions",
            "permissions with a second rule",
            || node(json!({"path": "/dev/pipe", "permissions": "rwm\na *:* rwm"})),
            (Prepare, REFUSED, "not a subset of rwm"),
        ),
    ]
}

fn mounts() -> Vec<Case> {
    vec![
        case(
            "mount-root",
            "mounts the node's root",
            || mount("/", "/host", &[]),
            (Prepare, DENIED, "never mounted"),
        ),
        case(
            "mount-etc",
            "mounts the node's passwords",
            || mount("/etc/shadow", "/x", &["ro"]),
            (Prepare, DENIED, "because of /etc"),
        ),
        case(
            "mount-docker",
            "mounts the socket by which one becomes the node",
            || mount("/var/run/docker.sock", "/x", &[]),
            (Prepare, DENIED, "because of /var/run"),
        ),
        case(
            "mount-above",
            "mounts a folder that has the kubelet's in it",
            || mount("/var/lib", "/x", &[]),
            (Prepare, DENIED, "never mounted"),
        ),
        case(
            "mount-proc",
            "mounts the node's processes",
            || mount("/proc/1/root", "/x", &[]),
            (Prepare, DENIED, "because of /proc"),
        ),
        case(
            "mount-by-a-way-up",
            "a place in the container that leads out of it",
            || mount("/usr/share", "/opt/../../etc", &[]),
            (Prepare, REFUSED, "not an absolute, plain path"),
        ),
        case(
            "mount-over-the-root",
            "puts a folder of the node in the place of the container's root",
            || mount("/usr/share", "/", &[]),
            (Prepare, DENIED, "nothing is put, because"),
        ),
        case(
            "mount-over-proc",
            "puts a folder in the place of the container's processes",
            || mount("/usr/share", "/proc/self", &[]),
            (Prepare, DENIED, "nothing is put, because"),
        ),
        case(
            "mount-over-the-loader",
            "puts a list of libraries where every program loads them",
            || mount("/usr/share", "/etc/ld.so.preload", &[]),
            (Prepare, DENIED, "nothing is put, because"),
        ),
        case(
            "mount-shared",
            "a mount whose mounts reach the node",
            || mount("/usr/share", "/x", &["rshared"]),
            (Prepare, DENIED, "\"rshared\""),
        ),
        case(
            "mount-suid",
            "a mount that gives rights back",
            || mount("/usr/share", "/x", &["ro", "suid"]),
            (Prepare, DENIED, "\"suid\""),
        ),
        case(
            "mount-with-more-options",
            "an option with others behind a comma",
            || mount("/usr/share", "/x", &["ro,dev,suid"]),
            (Prepare, DENIED, "\"ro,dev,suid\""),
        ),
        case(
            "mount-overlay",
            "a file system of its own",
            || {
                edits(
                    json!({"mounts": [{"host-path": "/usr/share", "container-path": "/x", "fs-type": "overlay"}]}),
                )
            },
            (Prepare, DENIED, "only bind mounts"),
        ),
    ]
}

fn variables() -> Vec<Case> {
    vec![
        case(
            "env-preload",
            "has every program load a library",
            || env("LD_PRELOAD", "/x.so"),
            (Prepare, DENIED, "env LD_PRELOAD"),
        ),
        case(
            "env-path",
            "has every program found elsewhere",
            || env("PATH", "/x"),
            (Prepare, DENIED, "env PATH"),
        ),
        case(
            "env-two",
            "a name that sets another variable",
            || env("A=1\nLD_PRELOAD", "x"),
            (Prepare, REFUSED, "not the name"),
        ),
        case(
            "env-with-equals",
            "a name with a value in it",
            || env("LD_PRELOAD=/x.so;A", "x"),
            (Prepare, REFUSED, "not the name"),
        ),
        case(
            "env-with-a-line",
            "a value with a second variable",
            || env("A", "1\nLD_PRELOAD=/x.so"),
            (Prepare, REFUSED, "control character"),
        ),
        case(
            "env-with-nul",
            "a value that ends early",
            || env("A", "1\0LD_PRELOAD=/x.so"),
            (Prepare, REFUSED, "control character"),
        ),
        case(
            "env-of-yaml",
            "a value that would be more than a value in YAML or JSON",
            || env("A", "\"}]}, - {hooks: [*x, &y]} # \\u0000 ${HOME} $(id) !!python/object"),
            (Harmless, "", ""),
        ),
        case(
            "env-65",
            "a variable more than allowed",
            || edits(json!({"env": {"$times": [65, ["A", "1"]]}})),
            (Prepare, REFUSED, "65 env, at most 64"),
        ),
    ]
}

fn programs() -> Vec<Case> {
    fn hook(hook: Value) -> Vec<u8> {
        edits(json!({"hooks": [hook]}))
    }
    vec![
        case(
            "hook-shell",
            "runs a shell on the node",
            || hook(json!({"stage": "prestart", "path": "/bin/sh", "args": ["sh", "-c", "id"]})),
            (Prepare, DENIED, "has not granted this very path"),
        ),
        case(
            "hook-by-a-way-up",
            "runs a shell by the way of a program that is granted",
            || hook(json!({"stage": "prestart", "path": "/bin/true/../sh"})),
            (Prepare, REFUSED, "not an absolute, plain path"),
        ),
        case(
            "hook-stage",
            "a program at a stage that is none",
            || hook(json!({"stage": "prestart\n", "path": "/bin/true"})),
            (Prepare, REFUSED, "is not one of"),
        ),
        case(
            "hook-preload",
            "has a program that is granted load a library, as root on the node",
            || hook(json!({"stage": "prestart", "path": "/bin/true", "env": [["LD_PRELOAD", "/x.so"]]})),
            (Prepare, DENIED, "env LD_PRELOAD"),
        ),
    ]
}

fn others() -> Vec<Case> {
    vec![
        case(
            "group-root",
            "puts the container's user into the group of root",
            || edits(json!({"additional-gids": [0]})),
            (Prepare, DENIED, "group of root"),
        ),
        case(
            "net-device-is-a-path",
            "takes an interface by a path",
            || edits(json!({"net-devices": [{"host-interface": "../eth0", "container-interface": "x"}]})),
            (Prepare, REFUSED, "network interface"),
        ),
        case(
            "net-device-nowhere",
            "takes an interface that the node has not",
            || edits(json!({"net-devices": [{"host-interface": "eth9", "container-interface": "x"}]})),
            (Prepare, INVALID, "no such interface"),
        ),
        case(
            "cache-class-is-a-path",
            "a class of service that is a path",
            || edits(json!({"intel-rdt": {"clos-id": "../../tasks"}})),
            (Prepare, REFUSED, "class of service"),
        ),
        case(
            "annotation-of-cdi",
            "has the runtime inject devices of others, by an annotation",
            || claim(json!({"annotations": [["cdi.k8s.io/x", "vendor.com/gpu=all"]]})),
            (Prepare, REFUSED, "cdi.k8s.io/x"),
        ),
        case(
            "annotation-with-a-line",
            "an annotation whose name has a second line",
            || claim(json!({"annotations": [["a\nb", "x"]]})),
            (Prepare, REFUSED, "control character"),
        ),
        case(
            "annotation-with-signs",
            "an annotation whose name is a list of pairs",
            || claim(json!({"annotations": [["a=b,cdi.k8s.io/x=vendor.com/gpu", "all"]]})),
            (Prepare, REFUSED, "not the name of an annotation"),
        ),
    ]
}
