//! A kubelet's request for claims, checked. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use nodedock_proto::kubelet::dra::v1::Claim;

use nodedock_model::limit::DRIVER_WAIT;
use nodedock_model::{ObjectRef, Problem, ProblemCode};

/// The claims of a call by UID exactly as it was sent, for that is how the answer is read. A claim that is named twice is one claim, and
/// a UID with two names is none.
pub(super) fn by_uid(claims: Vec<Claim>) -> BTreeMap<String, Result<ObjectRef, Problem>> {
    let mut by_uid = BTreeMap::new();
    for Claim {
        namespace,
        name,
        uid,
    } in claims
    {
        let claim = ObjectRef::new(&namespace, &name, &uid)
            .map_err(|error| Problem::invalid(ProblemCode::ClaimNameInvalid, error.to_string()));
        let entry = by_uid.entry(uid).or_insert_with(|| claim.clone());
        if *entry != claim {
            let message = "the call gives this UID to two claims";
            *entry = Err(Problem::invalid(ProblemCode::ClaimNamedTwice, message));
        }
    }
    by_uid
}

/// Returns the time for which a call waits for a driver that still loads: half of the time that the caller gives in the header
/// `grpc-timeout`, and at most the limit.
pub(super) fn patience(timeout: Option<&str>) -> Duration {
    let given = timeout.and_then(grpc_timeout).unwrap_or(Duration::MAX);
    (given / 2).min(DRIVER_WAIT)
}

/// Parses a timeout of at most eight digits and a unit (gRPC over HTTP/2). Returns None for any other text.
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

    fn claim(namespace: &str, name: &str, uid: &str) -> Claim {
        Claim {
            namespace: namespace.into(),
            name: name.into(),
            uid: uid.into(),
        }
    }

    fn code(entry: &Result<ObjectRef, Problem>) -> &str {
        entry
            .as_ref()
            .map_or_else(|problem| &*problem.code, |claim| claim.name.as_str())
    }

    #[test]
    fn each_uid_has_one_result() {
        let long = "x".repeat(10_000);
        let sorted = by_uid(vec![
            claim("default", "one", "u1"),
            claim("default", "one", "u1"),
            claim("default", "two", "u2"),
            claim("other", "two", "u2"),
            claim("default", "two", "u2"),
            claim("default", "three", "../u3"),
            claim("default", "four", ""),
            claim("Default", "five", "u5"),
            claim("default", "a/b", "u6"),
            claim(&long, &long, &long),
            claim("default", "seven", "u\u{0}7"),
        ]);
        let found: BTreeMap<&str, &str> = sorted
            .iter()
            .map(|(uid, entry)| (uid.as_str(), code(entry)))
            .collect();
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
    fn caller_timeout_bounds_driver_wait() {
        for (header, expected) in [
            (None, DRIVER_WAIT),
            (Some("45S"), DRIVER_WAIT),
            (Some("44999999u"), DRIVER_WAIT),
            (Some("5S"), Duration::from_millis(2500)),
            (Some("800m"), Duration::from_millis(400)),
            (Some("1000n"), Duration::from_nanos(500)),
            (Some("99999999H"), DRIVER_WAIT),
            (Some("1M"), DRIVER_WAIT),
            (Some("999999999S"), DRIVER_WAIT),
            (Some("-1S"), DRIVER_WAIT),
            (Some("S"), DRIVER_WAIT),
            (Some("5é"), DRIVER_WAIT),
            (Some(""), DRIVER_WAIT),
        ] {
            assert_eq!(patience(header), expected, "{header:?}");
        }
    }
}
