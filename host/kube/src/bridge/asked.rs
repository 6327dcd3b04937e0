//! What a kubelet asked for, sorted out. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use nodedock_model::limit::{BRIDGE_CLAIMS_MAX, BRIDGE_DRIVER_WAIT};
use nodedock_model::{ObjectRef, Problem};

/// A claim as a kubelet names it, unchecked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) namespace: String,
    pub(super) name: String,
    pub(super) uid: String,
}

/// The claims of a call by UID exactly as it was sent, for that is how the answer is read. Each has one entry: a claim that is named
/// twice is one claim, and a UID with two names is none.
pub(super) type Sorted = BTreeMap<String, Result<ObjectRef, Problem>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the call names {0} claims, and at most {BRIDGE_CLAIMS_MAX} are taken at once")]
pub(super) struct TooMany(pub(super) usize);

pub(super) fn sort(asked: Vec<Asked>) -> Result<Sorted, TooMany> {
    if asked.len() > BRIDGE_CLAIMS_MAX {
        return Err(TooMany(asked.len()));
    }
    let mut sorted = Sorted::new();
    for Asked { namespace, name, uid } in asked {
        let claim = ObjectRef::new(&namespace, &name, &uid)
            .map_err(|error| Problem::invalid("claim-name-invalid", error.to_string()));
        let entry = sorted.entry(uid).or_insert_with(|| claim.clone());
        if *entry != claim {
            let message = "the call gives this UID to two claims";
            *entry = Err(Problem::invalid("claim-named-twice", message));
        }
    }
    Ok(sorted)
}

/// How long a driver that still loads is waited for in a call: half of the time that the caller gives, which it says in the header
/// `grpc-timeout`, and no longer than is told in the limits.
pub(super) fn patience(timeout: Option<&str>) -> Duration {
    let given = timeout.and_then(grpc_timeout).unwrap_or(Duration::MAX);
    (given / 2).min(BRIDGE_DRIVER_WAIT)
}

/// At most eight digits and a unit (gRPC over HTTP/2). None: it is not that.
fn grpc_timeout(text: &str) -> Option<Duration> {
    let unit = text.chars().next_back()?;
    let digits = text.strip_suffix(unit)?;
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let count: u64 = digits.parse().ok()?;
    Some(match unit {
        'H' => Duration::from_secs(count * 3600),
        'M' => Duration::from_secs(count * 60),
        'S' => Duration::from_secs(count),
        'm' => Duration::from_millis(count),
        'u' => Duration::from_micros(count),
        'n' => Duration::from_nanos(count),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(namespace: &str, name: &str, uid: &str) -> Asked {
        Asked { namespace: namespace.into(), name: name.into(), uid: uid.into() }
    }

    fn code(entry: &Result<ObjectRef, Problem>) -> &str {
        entry.as_ref().map_or_else(|problem| &*problem.code, |claim| claim.name.as_str())
    }

    #[test]
    fn every_claim_has_one_entry_by_the_uid_that_was_sent() {
        let long = "x".repeat(10_000);
        let sorted = sort(vec![
            asked("default", "one", "u1"),
            asked("default", "one", "u1"),
            asked("default", "two", "u2"),
            asked("other", "two", "u2"),
            asked("default", "two", "u2"),
            asked("default", "three", "../u3"),
            asked("default", "four", ""),
            asked("Default", "five", "u5"),
            asked("default", "a/b", "u6"),
            asked(&long, &long, &long),
            asked("default", "seven", "u\u{0}7"),
        ]);
        let sorted = sorted.unwrap();
        let found: BTreeMap<&str, &str> =
            sorted.iter().map(|(uid, entry)| (uid.as_str(), code(entry))).collect();
        let expected = [
            ("u1", "one"),
            ("u2", "claim-named-twice"),
            ("../u3", "claim-name-invalid"),
            ("", "claim-name-invalid"),
            ("u5", "claim-name-invalid"),
            ("u6", "claim-name-invalid"),
            (&*long, "claim-name-invalid"),
            ("u\u{0}7", "claim-name-invalid"),
        ];
        assert_eq!(found, BTreeMap::from(expected));
        let words = sorted[&long].as_ref().unwrap_err().message.len();
        assert!(words < 400, "{words}");
    }

    #[test]
    fn more_claims_than_the_bound_are_refused_together() {
        let claims = |count| (0..count).map(|n| asked("ns", "name", &n.to_string())).collect::<Vec<_>>();
        assert_eq!(sort(claims(BRIDGE_CLAIMS_MAX)).unwrap().len(), BRIDGE_CLAIMS_MAX);
        assert_eq!(sort(claims(BRIDGE_CLAIMS_MAX + 1)), Err(TooMany(BRIDGE_CLAIMS_MAX + 1)));
        assert_eq!(sort(Vec::new()).unwrap(), Sorted::new());
    }

    #[test]
    fn the_callers_time_bounds_how_long_a_driver_is_waited_for() {
        for (header, expected) in [
            (None, BRIDGE_DRIVER_WAIT),
            (Some("45S"), BRIDGE_DRIVER_WAIT),
            (Some("44999999u"), BRIDGE_DRIVER_WAIT),
            (Some("5S"), Duration::from_millis(2500)),
            (Some("800m"), Duration::from_millis(400)),
            (Some("1000n"), Duration::from_nanos(500)),
            (Some("99999999H"), BRIDGE_DRIVER_WAIT),
            (Some("1M"), BRIDGE_DRIVER_WAIT),
            (Some("999999999S"), BRIDGE_DRIVER_WAIT),
            (Some("-1S"), BRIDGE_DRIVER_WAIT),
            (Some("S"), BRIDGE_DRIVER_WAIT),
            (Some("5é"), BRIDGE_DRIVER_WAIT),
            (Some(""), BRIDGE_DRIVER_WAIT),
        ] {
            assert_eq!(patience(header), expected, "{header:?}");
        }
    }
}
