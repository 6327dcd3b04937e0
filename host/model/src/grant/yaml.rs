//! Prints a grant file from a driver's request.

use std::fmt::Write as _;

use super::limits::{self, Knob};
use super::{Capabilities, GRANT_API_VERSION, GRANT_KIND, LimitRequest};

/// Returns a grant file with all capabilities that a driver requests. `driver` and `summary` are in its header.
pub fn to_yaml(driver: &str, summary: &str, request: &Capabilities, limits: &LimitRequest) -> String {
    let mut text = String::new();
    line(&mut text, format_args!("# What {driver} asks for: {}", summary.replace(char::is_control, " ")));
    line(
        &mut text,
        format_args!(
            "# Read it, take out what it shall not have, and put it beside the driver as NAME.grant.yaml."
        ),
    );
    line(&mut text, format_args!("apiVersion: {GRANT_API_VERSION}"));
    line(&mut text, format_args!("kind: {GRANT_KIND}"));
    list(&mut text, "sysfsRead", "# Paths below /sys.", &request.sysfs_read);
    if !request.sysfs_write.is_empty() {
        line(
            &mut text,
            format_args!(
                "# Paths below /sys that it writes while it prepares and unprepares, and the values."
            ),
        );
        line(&mut text, format_args!("sysfsWrite:"));
        for entry in &request.sysfs_write {
            line(
                &mut text,
                format_args!("  - {{glob: {}, pattern: {}}}", quoted(&entry.glob), quoted(&entry.pattern)),
            );
        }
    }
    list(
        &mut text,
        "deviceNodes",
        "# Device nodes that it looks at and gives to containers.",
        &request.device_nodes,
    );
    list(
        &mut text,
        "mounts",
        "# Directories and files of the node that it mounts into containers.",
        &request.mounts,
    );
    list(
        &mut text,
        "hooks",
        "# Programs of the node that run as root when a container starts.",
        &request.hooks,
    );
    list(&mut text, "env", "# Environment variables that it sets in containers.", &request.env);
    list(
        &mut text,
        "netDevices",
        "# Network interfaces that it moves into containers.",
        &request.net_devices,
    );
    push_limits(&mut text, limits);
    text
}

/// Prints the limits that the driver requests, and all others as comments.
fn push_limits(text: &mut String, asked: &LimitRequest) {
    line(text, format_args!("# Limits. What is commented out applies as it stands here."));
    let none = *asked == LimitRequest::default();
    line(text, format_args!("{}limits:", if none { "# " } else { "" }));
    let asked = [
        (limits::MEMORY, asked.memory_mib),
        (limits::WALL, asked.wall_ms),
        (limits::CPU, asked.cpu_ms),
        (limits::ANSWER, None),
        (limits::HOST_OPERATIONS, None),
        (limits::HOST_BYTES, None),
        (limits::LOG_LINES, None),
        (limits::LOG_BYTES, None),
        (limits::CONCURRENT_CALLS, None),
    ];
    for (Knob { key, default, max, what }, asked) in asked {
        match asked {
            Some(asked) => line(text, format_args!("  {key}: {asked}  # at most {max}: {what}")),
            None => line(text, format_args!("#   {key}: {default}  # at most {max}: {what}")),
        }
    }
}

fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    writeln!(text, "{content}").expect("writing to a String does not fail");
}

fn list(text: &mut String, key: &str, comment: &str, entries: &[String]) {
    if entries.is_empty() {
        return;
    }
    line(text, format_args!("{comment}"));
    line(text, format_args!("{key}:"));
    for entry in entries {
        line(text, format_args!("  - {}", quoted(entry)));
    }
}

/// A JSON string is a YAML string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
