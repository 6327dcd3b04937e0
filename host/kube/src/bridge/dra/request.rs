//! A kubelet's request for claims, checked. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use nodedock_proto::kubelet::dra::v1::Claim;

use crate::bridge::Patience;
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

/// Returns the time for which a call waits for a driver: half of the time that the caller gives in the header `grpc-timeout`, or two thirds
/// for one that may return, and at most the limits. An unprepare waits for none that is gone: the kubelet retries it after some seconds.
pub(super) fn patience(timeout: Option<&str>, is_prepare: bool) -> Patience {
    let given = timeout.and_then(grpc_timeout).unwrap_or(Duration::MAX);
    Patience {
        loading: (given / 2).min(Patience::MAX.loading),
        returning: match is_prepare {
            true => (given / 3).saturating_mul(2).min(Patience::MAX.returning),
            false => Duration::ZERO,
        },
    }
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
        let of = |loading: u64, returning: u64| Patience {
            loading: Duration::from_millis(loading),
            returning: Duration::from_millis(returning),
        };
        for (header, expected) in [
            (None, Patience::MAX),
            (Some("45S"), Patience::MAX),
            (Some("6S"), of(3000, 4000)),
            (Some("30S"), of(10_000, 20_000)),
            (Some("900m"), of(450, 600)),
            (Some("6000000n"), of(3, 4)),
            (Some("99999999H"), Patience::MAX),
            (Some("1M"), Patience::MAX),
            (Some("999999999S"), Patience::MAX),
            (Some("-1S"), Patience::MAX),
            (Some("S"), Patience::MAX),
            (Some("5é"), Patience::MAX),
            (Some(""), Patience::MAX),
        ] {
            assert_eq!(patience(header, true), expected, "{header:?}");
            let unprepare = patience(header, false);
            assert_eq!(unprepare.loading, expected.loading, "{header:?}");
            assert_eq!(unprepare.returning, Duration::ZERO, "{header:?}");
        }
    }
}
