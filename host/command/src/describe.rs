//! Messages of the node API as text for people.

use std::time::Duration;

use nodedock_proto::node::v1;

use crate::output::joined;
use nodedock_base::clock::rfc3339;

/// The consumers of a claim that a line names.
const CONSUMERS_NAMED_MAX: usize = 8;

/// `NAMESPACE/NAME`.
pub fn name(object: &v1::ObjectRef) -> String {
    format!("{}/{}", object.namespace, object.name)
}

/// `NAMESPACE/NAME (UID UID)`.
pub fn object(object: &v1::ObjectRef) -> String {
    format!("{}/{} (UID {})", object.namespace, object.name, object.uid)
}

/// The state of a claim; of one that was prepared in an earlier boot, and not again since, another one than `prepared`.
pub fn claim_state(state: &str, stale_boot: bool) -> &str {
    match (state, stale_boot) {
        ("prepared", true) => "prepared-before-reboot",
        _ => state,
    }
}

/// A number of things, of which `noun` is the name of one: `1 attempt`, `2 attempts`.
pub fn count(count: impl Into<u64>, noun: &str) -> String {
    let count = count.into();
    let s = if count == 1 { "" } else { "s" };
    format!("{count} {noun}{s}")
}

/// A cell of a table with the names of objects.
pub fn names(objects: &[v1::ObjectRef]) -> String {
    joined(objects.iter().map(name))
}

/// The readings of a device, sorted, each as `NAME=VALUE`.
pub fn readings(device: &v1::Device) -> Vec<String> {
    let readings = device.readings.iter();
    let mut lines: Vec<_> = readings
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    lines.sort();
    lines
}

pub fn problem(problem: &Option<v1::Problem>, indent: &str) -> Vec<String> {
    let Some(v1::Problem {
        kind,
        code,
        message,
        details,
        ..
    }) = problem
    else {
        return Vec::new();
    };
    let mut lines = vec![format!("{indent}problem ({kind}, {code}): {message}")];
    lines.extend(
        details
            .iter()
            .map(|(key, value)| format!("{indent}  {key}: {value}")),
    );
    lines
}

/// Describes whether a driver's file is trusted, by which key or pin, or why not.
pub fn trust(trust: &v1::DriverTrust) -> String {
    let v1::DriverTrust {
        mode,
        verdict,
        key,
        pin,
        reason,
    } = trust;
    let (key, pin) = (
        prefixed(", signed by ", key),
        prefixed(", pinned for ", pin),
    );
    format!(
        "{verdict} (mode {mode}){key}{pin}{}",
        prefixed(": ", reason)
    )
}

fn prefixed(before: &str, text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!("{before}{text}"),
    }
}

/// Describes a driver's change below `/sys`, and the restore at the release of its claim.
pub fn sysfs_value(value: &v1::SysfsValue) -> String {
    let (before, found, left) = (
        shown(&value.before),
        shown(&value.found),
        shown(&value.left),
    );
    let (path, driver) = (format!("/sys/{}", value.path), &value.driver);
    let why = match &value.problem {
        Some(problem) => format!(" ({}): {}", problem.code, problem.message),
        None => String::new(),
    };
    match value.end.as_str() {
        "" => format!("{path} was {before}, changed by driver {driver} to {left}"),
        "possible" => {
            format!(
                "{path} is {found}, changed by driver {driver}, and would be restored to {before}"
            )
        }
        "put-back" => {
            format!(
                "{path} was {found}, changed by driver {driver}, and is restored to {before}{why}"
            )
        }
        "as-before" => format!("{path} is {before}, as it was before driver {driver} changed it"),
        _ => format!("{path}, changed by driver {driver}, was not restored{why}"),
    }
}

fn shown(text: &Option<String>) -> String {
    text.as_deref()
        .map_or_else(|| "unknown".to_owned(), |text| format!("{text:?}"))
}

/// A taint as `kubectl taint` writes it, and where it comes from.
pub fn taint(taint: &v1::Taint) -> String {
    let v1::Taint {
        key,
        value,
        effect,
        source,
        rule,
    } = taint;
    let equals = if value.is_empty() { "" } else { "=" };
    let from = if rule.is_empty() {
        source.clone()
    } else {
        format!("{source} {rule}")
    };
    format!("{key}{equals}{value}:{effect} ({from})")
}

/// A cell of a table: the consumers for which a kubelet had a claim prepared.
pub fn kubelet_consumers(hold: &v1::KubeletHold) -> String {
    // The column is that of pods: of another consumer it has the kind.
    let names: Vec<_> = hold
        .consumers
        .iter()
        .map(|of| match (of.api_group.as_str(), of.resource.as_str()) {
            ("", "pods") => of.name.clone(),
            (_, resource) => format!("{resource}/{}", of.name),
        })
        .collect();
    if names.is_empty() {
        "(kubelet)".to_owned()
    } else {
        format!("{} (kubelet)", names.join(","))
    }
}

/// Describes since when, for which drivers and for which consumers a kubelet has had a claim prepared.
pub fn kubelet_hold(hold: &v1::KubeletHold) -> String {
    let mut consumers: Vec<_> = hold
        .consumers
        .iter()
        .take(CONSUMERS_NAMED_MAX)
        .map(consumer)
        .collect();
    if hold.consumers.len() > CONSUMERS_NAMED_MAX {
        consumers.push(format!(
            "and {} more",
            hold.consumers.len() - CONSUMERS_NAMED_MAX
        ));
    }
    let (since, drivers) = (rfc3339(hold.since_ms), hold.drivers.join(", "));
    let reserved = match consumers.is_empty() {
        true => String::new(),
        false => format!("; reserved for {}", consumers.join(", ")),
    };
    format!("in use by the kubelet since {since}, prepared by {drivers}{reserved}")
}

fn consumer(of: &v1::Consumer) -> String {
    let group = if of.api_group.is_empty() {
        String::new()
    } else {
        format!(".{}", of.api_group)
    };
    format!("{}{group} {} (UID {})", of.resource, of.name, of.uid)
}

/// The process that sent a request, as far as its socket says.
pub fn caller(caller: &v1::Caller) -> String {
    let pid = caller
        .pid
        .map(|pid| format!(", pid {pid}"))
        .unwrap_or_default();
    match (caller.uid, caller.user.as_str()) {
        (None, _) => format!("an unknown user{pid}"),
        (Some(uid), "") => format!("uid {uid}{pid}"),
        (Some(uid), user) => format!("{user} (uid {uid}){pid}"),
    }
}

/// Describes an entry of a timeline.
pub fn transition(entry: &v1::Transition) -> String {
    let mut text = entry.what.clone();
    if !entry.cause.is_empty() {
        text.push_str(&format!(" ({})", entry.cause));
    }
    if entry.duration_us > 0 {
        text.push_str(&format!(
            ", took {:.1?}",
            Duration::from_micros(entry.duration_us)
        ));
    }
    if let Some(v1::Again { count, last_at_ms }) = entry.again {
        let (last, passed) = (rfc3339(last_at_ms), elapsed(entry.at_ms, last_at_ms));
        text.push_str(&format!(
            "; {count} times in all, the last on {last} (+{passed})"
        ));
    }
    text
}

/// The time between two points, in whole seconds if it is one or more; nothing if the clock was set back.
pub fn elapsed(from_ms: u64, to_ms: u64) -> String {
    let ms = to_ms.saturating_sub(from_ms);
    let ms = if ms < 1000 { ms } else { ms - ms % 1000 };
    format!(
        "{:#}",
        jiff::SignedDuration::from_millis(i64::try_from(ms).unwrap_or(i64::MAX))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reboot_ends_the_prepared_state() {
        assert_eq!(claim_state("prepared", false), "prepared");
        assert_eq!(claim_state("prepared", true), "prepared-before-reboot");
        assert_eq!(claim_state("unpreparing", true), "unpreparing");
    }

    #[test]
    fn one_thing_has_no_plural() {
        let counts = [0_u32, 1, 2].map(|of| count(of, "attempt"));
        assert_eq!(counts, ["0 attempts", "1 attempt", "2 attempts"]);
    }

    #[test]
    fn elapsed_times_are_short_and_saturating() {
        for (ms, text) in [
            (5, "5ms"),
            (59_999, "59s"),
            (61_000, "1m 1s"),
            (7_980_000, "2h 13m"),
        ] {
            assert_eq!(elapsed(1000, 1000 + ms), text);
        }
        assert_eq!(elapsed(5, 3), "0s");
        assert!(!elapsed(0, u64::MAX).is_empty());
    }

    #[test]
    fn repeated_entry_has_count_and_last() {
        let again = Some(v1::Again {
            count: 7,
            last_at_ms: 62_000,
        });
        let (what, cause) = ("unprepare failed".to_owned(), "gpu.example.com".to_owned());
        let entry = v1::Transition {
            at_ms: 2_000,
            what,
            cause,
            duration_us: 1_500,
            problem: None,
            again,
        };
        let expected = "unprepare failed (gpu.example.com), took 1.5ms; 7 times in all, the last on 1970-01-01T00:01:02.000Z (+1m)";
        assert_eq!(transition(&entry), expected);
        let plain = v1::Transition {
            what: "prepared".to_owned(),
            ..v1::Transition::default()
        };
        assert_eq!(transition(&plain), "prepared");
    }

    #[test]
    fn caller_is_named_by_known_fields() {
        let by = |uid, user: &str, pid| {
            caller(&v1::Caller {
                uid,
                user: user.to_owned(),
                pid,
            })
        };
        assert_eq!(by(Some(0), "root", Some(7)), "root (uid 0), pid 7");
        assert_eq!(by(Some(1000), "", None), "uid 1000");
        assert_eq!(by(None, "", None), "an unknown user");
    }

    #[test]
    fn kubelet_is_shown_with_claim_consumers() {
        let consumer = |n: usize| v1::Consumer {
            resource: "pods".to_owned(),
            name: format!("p{n}"),
            uid: format!("u{n}"),
            api_group: String::new(),
        };
        let hold = |consumers: usize| v1::KubeletHold {
            since_ms: 0,
            drivers: vec!["gpu.example.com".to_owned()],
            consumers: (0..consumers).map(consumer).collect(),
        };
        assert_eq!(
            (kubelet_consumers(&hold(0)), kubelet_consumers(&hold(2))),
            ("(kubelet)".into(), "p0,p1 (kubelet)".into())
        );
        let text =
            "in use by the kubelet since 1970-01-01T00:00:00.000Z, prepared by gpu.example.com";
        assert_eq!(kubelet_hold(&hold(0)), text);
        assert_eq!(
            kubelet_hold(&hold(1)),
            format!("{text}; reserved for pods p0 (UID u0)")
        );
        let mut of_group = hold(2);
        of_group.consumers[1].resource = "podgroups".to_owned();
        of_group.consumers[1].api_group = "scheduling.k8s.io".to_owned();
        assert_eq!(kubelet_consumers(&of_group), "p0,podgroups/p1 (kubelet)");
        assert!(
            kubelet_hold(&of_group)
                .ends_with("pods p0 (UID u0), podgroups.scheduling.k8s.io p1 (UID u1)")
        );
        assert!(kubelet_hold(&hold(10)).ends_with("pods p7 (UID u7), and 2 more"));
    }

    #[test]
    fn taint_is_shown_with_its_source() {
        let of = |value: &str, source: &str, rule: &str| {
            let text = str::to_owned;
            let (key, effect) = (text("example.com/worn"), text("NoExecute"));
            taint(&v1::Taint {
                key,
                value: text(value),
                effect,
                source: text(source),
                rule: text(rule),
            })
        };
        assert_eq!(
            of("x", "driver", ""),
            "example.com/worn=x:NoExecute (driver)"
        );
        assert_eq!(
            of("", "rule", "maintenance"),
            "example.com/worn:NoExecute (rule maintenance)"
        );
    }

    #[test]
    fn each_value_end_has_a_text() {
        let is = |end: &str, before: Option<&str>, message: &str, expected: &str| {
            let problem = v1::Problem {
                code: "value-changed".into(),
                message: message.into(),
                ..Default::default()
            };
            let value = v1::SysfsValue {
                driver: "led.dev".to_owned(),
                path: "class/led".to_owned(),
                before: before.map(str::to_owned),
                left: Some("2".to_owned()),
                found: Some("1".to_owned()),
                end: end.to_owned(),
                problem: Some(problem).filter(|_| !message.is_empty()),
            };
            assert_eq!(sysfs_value(&value), format!("/sys/class/led{expected}"));
        };
        is(
            "",
            Some("0"),
            "",
            " was \"0\", changed by driver led.dev to \"2\"",
        );
        is(
            "",
            None,
            "",
            " was unknown, changed by driver led.dev to \"2\"",
        );
        is(
            "possible",
            Some("0"),
            "",
            " is \"1\", changed by driver led.dev, and would be restored to \"0\"",
        );
        is(
            "put-back",
            Some("0"),
            "",
            " was \"1\", changed by driver led.dev, and is restored to \"0\"",
        );
        is(
            "as-before",
            Some("0"),
            "",
            " is \"0\", as it was before driver led.dev changed it",
        );
        is(
            "left",
            Some("0"),
            "no",
            ", changed by driver led.dev, was not restored (value-changed): no",
        );
    }
}
