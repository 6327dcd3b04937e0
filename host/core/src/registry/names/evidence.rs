//! Evidence of claims and stored files for the sources of drivers whose names have no record, since the checkpoint was lost. Pure.

use std::collections::{BTreeMap, BTreeSet};

use super::Evidence;
use nodedock_model::{ClaimRecord, DriverKind, DriverName, PreparedBy, SourceKind};

/// A driver file that served, as it was stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredSource {
    pub digest: String,
    pub driver: DriverName,
    /// Name of the file without `.wasm`.
    pub stem: String,
}

/// Evidence of one claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Testimony {
    Stem(String),
    Digest(String),
    Kind(SourceKind),
}

/// Returns the sources of drivers by their claims, those that prepared the most, and of drivers without claims by the files that are stored.
pub fn evidence<'a>(
    claims: impl IntoIterator<Item = &'a ClaimRecord>,
    stored: &[StoredSource],
) -> BTreeMap<DriverName, Evidence> {
    let mut heard: BTreeMap<DriverName, BTreeMap<Testimony, usize>> = BTreeMap::new();
    for (driver, part) in claims.into_iter().flat_map(|claim| &claim.drivers) {
        if let Some(testimony) = part
            .by
            .as_ref()
            .and_then(|by| testimony(driver, by, stored))
        {
            *heard
                .entry(driver.clone())
                .or_default()
                .entry(testimony)
                .or_default() += 1;
        }
    }
    let drivers: BTreeSet<_> = stored.iter().map(|stored| stored.driver.clone()).collect();
    let without = drivers
        .into_iter()
        .filter(|driver| !heard.contains_key(driver));
    let of_files = without
        .filter_map(|driver| Some((driver.clone(), Evidence::Stem(only_stem(&driver, stored)?))));
    let mut found: BTreeMap<_, _> = of_files.collect();
    found.extend(
        heard
            .into_iter()
            .filter_map(|(driver, heard)| Some((driver, weighed(heard)?))),
    );
    found
}

fn testimony(driver: &DriverName, by: &PreparedBy, stored: &[StoredSource]) -> Option<Testimony> {
    let is_stored = |stored: &&StoredSource| stored.digest == by.digest && stored.driver == *driver;
    match by.kind {
        DriverKind::Grpc => Some(Testimony::Kind(SourceKind::Plugin)),
        DriverKind::Adapter => Some(Testimony::Kind(SourceKind::Adapter)),
        DriverKind::Cdi => Some(Testimony::Kind(SourceKind::Cdi)),
        DriverKind::Wasm if !by.digest.is_empty() => Some(match stored.iter().find(is_stored) {
            Some(stored) => Testimony::Stem(stored.stem.clone()),
            None => Testimony::Digest(by.digest.clone()),
        }),
        // A claim that was rebuilt from its CDI file has this kind, and the version alone tells others: of a native plugin it is that of its API.
        DriverKind::Wasm if by.version.starts_with('v') => {
            Some(Testimony::Kind(SourceKind::Plugin))
        }
        DriverKind::Wasm if by.version.is_empty() => None,
        DriverKind::Wasm => Some(match only_stem(driver, stored) {
            Some(stem) => Testimony::Stem(stem),
            None => Testimony::Kind(SourceKind::File),
        }),
    }
}

/// The name of the file that is stored for a driver, if all have the same.
fn only_stem(driver: &DriverName, stored: &[StoredSource]) -> Option<String> {
    let of_driver = stored.iter().filter(|stored| stored.driver == *driver);
    let stems: BTreeSet<_> = of_driver.map(|stored| stored.stem.as_str()).collect();
    (stems.len() == 1)
        .then(|| stems.first().map(|stem| (*stem).to_owned()))
        .flatten()
}

/// The source that prepared the most claims. Digests count together: each is of a version.
fn weighed(heard: BTreeMap<Testimony, usize>) -> Option<Evidence> {
    let digests = heard.keys().filter_map(|testimony| match testimony {
        Testimony::Digest(digest) => Some(digest.clone()),
        _ => None,
    });
    let digests: BTreeSet<_> = digests.collect();
    let (most, _) = heard.into_iter().rev().max_by_key(|(_, count)| *count)?;
    Some(match most {
        Testimony::Stem(stem) => Evidence::Stem(stem),
        Testimony::Digest(_) => Evidence::Digests(digests),
        Testimony::Kind(kind) => Evidence::Kind(kind),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::{ClaimState, DriverPart, ObjectRef};

    fn name() -> DriverName {
        DriverName::new("gpu.example.com").unwrap()
    }

    fn claim(number: usize, kind: DriverKind, version: &str, digest: &str) -> ClaimRecord {
        let id =
            ObjectRef::new("default", &format!("c{number}"), &format!("uid-{number}")).unwrap();
        let mut claim = ClaimRecord::new(id, ClaimState::Prepared, "boot");
        let by = PreparedBy {
            kind,
            version: version.to_owned(),
            digest: digest.to_owned(),
            lists: false,
        };
        let part = DriverPart {
            by: Some(by),
            ..DriverPart::default()
        };
        claim.drivers.insert(name(), Box::new(part));
        claim
    }

    fn stored(digest: &str, stem: &str) -> StoredSource {
        StoredSource {
            digest: digest.to_owned(),
            driver: name(),
            stem: stem.to_owned(),
        }
    }

    fn of(claims: &[ClaimRecord], stored: &[StoredSource]) -> Option<Evidence> {
        evidence(claims, stored).remove(&name())
    }

    #[test]
    fn claims_name_their_preparing_file() {
        let wasm = |number, digest| claim(number, DriverKind::Wasm, "1.0.0", digest);
        let stem = |stem: &str| Some(Evidence::Stem(stem.to_owned()));
        let both = [stored("d1", "gpu"), stored("d2", "aaa")];
        assert_eq!(of(&[wasm(1, "d1")], &both), stem("gpu"));
        // The squatter served last, and prepared less.
        assert_eq!(
            of(&[wasm(1, "d1"), wasm(2, "d1"), wasm(3, "d2")], &both),
            stem("gpu")
        );
        let digests = ["d1", "d3"].map(str::to_owned).into();
        assert_eq!(
            of(&[wasm(1, "d1"), wasm(2, "d3")], &[]),
            Some(Evidence::Digests(digests))
        );
    }

    #[test]
    fn claims_name_other_driver_kinds() {
        let kind = |kind| Some(Evidence::Kind(kind));
        assert_eq!(
            of(&[claim(1, DriverKind::Grpc, "v1", "")], &[stored("d", "a")]),
            kind(SourceKind::Plugin)
        );
        assert_eq!(
            of(&[claim(1, DriverKind::Adapter, "", "")], &[]),
            kind(SourceKind::Adapter)
        );
    }

    #[test]
    fn rebuilt_claims_distinguish_plugins_and_files() {
        let rebuilt = |version| [claim(1, DriverKind::Wasm, version, "")];
        assert_eq!(
            of(&rebuilt("v1beta1"), &[]),
            Some(Evidence::Kind(SourceKind::Plugin))
        );
        assert_eq!(
            of(&rebuilt("1.0.0"), &[]),
            Some(Evidence::Kind(SourceKind::File))
        );
        assert_eq!(
            of(&rebuilt("1.0.0"), &[stored("d", "gpu")]),
            Some(Evidence::Stem("gpu".to_owned()))
        );
        assert_eq!(of(&rebuilt(""), &[]), None);
    }

    #[test]
    fn stored_files_count_where_they_agree() {
        assert_eq!(
            of(&[], &[stored("d1", "gpu"), stored("d2", "gpu")]),
            Some(Evidence::Stem("gpu".to_owned()))
        );
        assert_eq!(of(&[], &[stored("d1", "gpu"), stored("d2", "aaa")]), None);
    }
}
