//! Prints a grant file from a driver's request.

use crate::rule::is_unprintable;

use super::{Capabilities, GRANT_API_VERSION, GRANT_KIND, LimitKey, LimitValues, ValueGrant};

/// Returns a grant file with all capabilities that a driver requests. `driver` and `summary` are in its header.
pub fn to_yaml(
    driver: &str,
    summary: &str,
    request: &Capabilities,
    limits: &LimitValues,
) -> String {
    let summary = summary.replace(is_unprintable, " ");
    let mut lines = vec![
        format!("# What {driver} asks for: {summary}"),
        "# Read it, take out what it shall not have, and put it beside the driver as NAME.grant.yaml."
            .to_owned(),
        format!("apiVersion: {GRANT_API_VERSION}"),
        format!("kind: {GRANT_KIND}"),
    ];
    let mut list = |key, comment, entries: Vec<String>| {
        if !entries.is_empty() {
            lines.extend([format!("# {comment}"), format!("{key}:")]);
            lines.extend(entries.into_iter().map(|entry| format!("  - {entry}")));
        }
    };
    list(
        "sysfsRead",
        "Paths below /sys.",
        quoted_all(&request.sysfs_read),
    );
    let written =
        "Paths below /sys that it writes while it prepares and unprepares, and the values.";
    list(
        "sysfsWrite",
        written,
        request
            .sysfs_write
            .iter()
            .map(|ValueGrant { glob, pattern }| {
                format!("{{glob: {}, pattern: {}}}", quoted(glob), quoted(pattern))
            })
            .collect(),
    );
    list(
        "hostFiles",
        "Files outside /sys and /dev that it reads.",
        quoted_all(&request.host_files),
    );
    let bound =
        "PCI functions that it binds while it prepares and unprepares, and the kernel drivers.";
    list(
        "pciDriver",
        bound,
        request
            .pci_driver
            .iter()
            .map(|ValueGrant { glob, pattern }| {
                format!(
                    "{{functions: {}, drivers: {}}}",
                    quoted(glob),
                    quoted(pattern)
                )
            })
            .collect(),
    );
    let nodes = "Device nodes that it looks at and gives to containers.";
    list("deviceNodes", nodes, quoted_all(&request.device_nodes));
    let mounts = "Directories and files of the node that it mounts into containers.";
    list("mounts", mounts, quoted_all(&request.mounts));
    let hooks = "Programs of the node that run as root when a container starts.";
    list("hooks", hooks, quoted_all(&request.hooks));
    list(
        "env",
        "Environment variables that it sets in containers.",
        quoted_all(&request.env),
    );
    let interfaces = "Network interfaces that it looks at and moves into containers.";
    list("netDevices", interfaces, quoted_all(&request.net_devices));
    lines.extend(UNREQUESTED.lines().map(str::to_owned));
    push_limits(&mut lines, limits);
    lines.join("\n") + "\n"
}

fn quoted_all(entries: &[String]) -> Vec<String> {
    entries.iter().map(|entry| quoted(entry)).collect()
}

/// Capabilities that a driver does not request: what it returns needs them.
const UNREQUESTED: &str = r#"# Not requested, and refused without a grant when the driver returns it:
# driver: acme.example.com                 # the only name that the driver may have
# extendedResources: [acme.example.com/*]  # extended-resource names of its pools
# groups: [44]                             # additional groups of containers
# rdtClasses: [acme]                       # classes of service (Intel RDT)
# annotations: [acme.example.com/*]        # annotations for container runtimes
# mounts: ["/var/lib/acme/*:rw"]           # sources that containers may write to"#;

/// Prints the limits that the driver requests, and all others as comments.
fn push_limits(lines: &mut Vec<String>, requested: &LimitValues) {
    lines.push("# Limits. A limit in a comment has this value.".to_owned());
    lines.push(format!(
        "{}limits:",
        if requested.is_empty() { "# " } else { "" }
    ));
    lines.extend(LimitKey::ALL.iter().map(|key| {
        let ((default, max), comment) = (key.bounds(), key.comment());
        match requested.get(key) {
            Some(requested) => format!("  {key}: {requested}  # at most {max}: {comment}"),
            None => format!("#   {key}: {default}  # at most {max}: {comment}"),
        }
    }));
}

/// A JSON string is a YAML string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
