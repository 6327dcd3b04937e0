//! Plan of the claims that answer an Allocate: existing ones, and a new one for the rest. Pure.
//!
//! A kubelet allocates a device to one pod at a time, so a claim that has some of the requested devices is either of the same pod (its init
//! containers' devices serve its later containers, in any combination), or of a pod that is gone. Two facts distinguish the two: the time,
//! because a pod is admitted as a whole, and the kubelet's list of the devices that pods use.

use crate::bridge::claims::DeviceClaim;
use crate::bridge::plugin_claim::Ids;

/// A claim for devices that were allocated before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Existing {
    pub(super) claim: DeviceClaim,
    /// It was requested within the time of an admission.
    pub(super) is_fresh: bool,
    /// True if a pod uses any of its devices, by the kubelet's list; None: it is not known.
    pub(super) is_used: Option<bool>,
}

impl Existing {
    fn is_unused(&self) -> bool {
        !self.is_fresh && self.is_used == Some(false)
    }

    fn has_any(&self, ids: &Ids) -> bool {
        !self.claim.devices.is_disjoint(ids)
    }
}

/// Plan for the answer to an Allocate.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Claims that no pod uses any more: released first.
    pub(super) release: Vec<DeviceClaim>,
    /// Claims that serve again, with the devices that are wanted of each.
    pub(super) join: Vec<(DeviceClaim, Ids)>,
    /// Devices for a new claim.
    pub(super) new: Ids,
}

/// Returns whether the plan depends on which devices pods use.
pub(super) fn depends_on_pods(wanted: &Ids, existing: &[Existing]) -> bool {
    existing
        .iter()
        .any(|claim| !claim.is_fresh && claim.has_any(wanted))
}

/// Plans for the wanted devices. A claim that a pod may still use is not released, it serves again.
pub(super) fn plan(wanted: &Ids, existing: &[Existing]) -> Plan {
    let mut touched: Vec<_> = existing
        .iter()
        .filter(|claim| claim.has_any(wanted))
        .collect();
    // The claim of the very same devices needs no other.
    touched.sort_by_key(|existing| {
        (
            existing.claim.devices != *wanted,
            existing.claim.claim.clone(),
        )
    });
    let mut plan = Plan {
        new: wanted.clone(),
        ..Plan::default()
    };
    for existing in touched {
        if existing.is_unused() {
            plan.release.push(existing.claim.clone());
            continue;
        }
        let shared: Ids = plan
            .new
            .intersection(&existing.claim.devices)
            .cloned()
            .collect();
        if !shared.is_empty() {
            plan.new.retain(|id| !shared.contains(id));
            plan.join.push((existing.claim.clone(), shared));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;
    use tokio::time::Instant;

    use super::*;
    use nodedock_model::{DriverName, ObjectRef};

    fn ids(ids: &str) -> Ids {
        ids.chars().map(|id| format!("p/{id}")).collect()
    }

    fn existing(devices: &str, is_fresh: bool) -> Existing {
        let claim =
            ObjectRef::new("nodedock", &format!("c-{devices}"), &format!("u-{devices}")).unwrap();
        let driver = DriverName::new("gpu.example.com").unwrap();
        let claim = DeviceClaim {
            claim,
            driver,
            devices: ids(devices),
            requested: Instant::now(),
        };
        Existing {
            claim,
            is_fresh,
            is_used: None,
        }
    }

    fn with_use(claims: &[Existing], in_use: Option<&Ids>) -> Vec<Existing> {
        let is_used = |claim: &Existing| in_use.map(|in_use| claim.has_any(in_use));
        claims
            .iter()
            .map(|claim| Existing {
                is_used: is_used(claim),
                ..claim.clone()
            })
            .collect()
    }

    /// Released, joined (with what of it), new; each as letters.
    fn planned(
        wanted: &str,
        claims: &[Existing],
        in_use: Option<&str>,
    ) -> (String, String, String) {
        let plan = plan(&ids(wanted), &with_use(claims, in_use.map(ids).as_ref()));
        let letters = |ids: &Ids| ids.iter().map(|id| &id[2..]).collect::<String>();
        let released: Vec<_> = plan
            .release
            .iter()
            .map(|claim| letters(&claim.devices))
            .collect();
        let joined: Vec<_> = plan
            .join
            .iter()
            .map(|(claim, of)| format!("{}:{}", letters(&claim.devices), letters(of)))
            .collect();
        (released.join(" "), joined.join(" "), letters(&plan.new))
    }

    #[test]
    fn containers_share_claims_within_a_pod() {
        let of = |released: &str, joined: &str, new: &str| {
            (released.to_owned(), joined.to_owned(), new.to_owned())
        };
        let (new, old) = (
            |devices| existing(devices, true),
            |devices| existing(devices, false),
        );
        for (wanted, claims, in_use, expected) in [
            ("ab", vec![], None, of("", "", "ab")),
            ("ab", vec![new("cd")], Some(""), of("", "", "ab")),
            // The same again; a part; more; of two.
            ("ab", vec![new("ab")], None, of("", "ab:ab", "")),
            ("a", vec![new("ab")], None, of("", "ab:a", "")),
            ("abc", vec![new("ab")], None, of("", "ab:ab", "c")),
            (
                "bc",
                vec![new("ab"), new("cd")],
                None,
                of("", "ab:b cd:c", ""),
            ),
            // Of a pod that is gone, and of one that perhaps is not.
            ("ab", vec![old("ab")], Some(""), of("ab", "", "ab")),
            ("ab", vec![old("ab")], None, of("", "ab:ab", "")),
            ("ab", vec![old("ab")], Some("a"), of("", "ab:ab", "")),
            (
                "bc",
                vec![old("ab"), new("cd")],
                Some(""),
                of("ab", "cd:c", "b"),
            ),
            ("b", vec![old("ab")], Some("a"), of("", "ab:b", "")),
        ] {
            assert_eq!(
                planned(wanted, &claims, in_use),
                expected,
                "{wanted} {claims:?} {in_use:?}"
            );
        }
        assert!(!depends_on_pods(&ids("a"), &[new("ab"), old("c")]));
        assert!(depends_on_pods(&ids("a"), &[new("b"), old("ac")]));
    }

    proptest! {
        #[test]
        fn plan_serves_each_device_once(
            wanted in "[a-h]{1,5}",
            claims in prop::collection::vec(("[a-h]{1,4}", any::<bool>()), 0..5),
            in_use in prop::option::of("[a-h]{0,5}"),
        ) {
            let numbered = |(number, (devices, fresh)): (usize, &(String, bool))| {
                let mut existing = existing(devices, *fresh);
                existing.claim.claim = ObjectRef::new("nodedock", "c", &number.to_string()).unwrap();
                existing
            };
            let claims: Vec<_> = claims.iter().enumerate().map(numbered).collect();
            let in_use = in_use.as_deref().map(ids);
            let plan = plan(&ids(&wanted), &with_use(&claims, in_use.as_ref()));
            let mut served: Vec<_> = plan.join.iter().flat_map(|(_, of)| of).chain(&plan.new).cloned().collect();
            let count = served.len();
            served.sort();
            served.dedup();
            prop_assert_eq!(count, served.len());
            prop_assert_eq!(served.into_iter().collect::<BTreeSet<_>>(), ids(&wanted));
            for claim in &plan.release {
                prop_assert!(!claims.iter().any(|existing| existing.claim == *claim && existing.is_fresh));
                prop_assert!(in_use.as_ref().is_some_and(|in_use| in_use.is_disjoint(&claim.devices)));
            }
            for (claim, of) in &plan.join {
                prop_assert!(of.is_subset(&claim.devices) && !of.is_empty());
                prop_assert!(!plan.release.contains(claim));
            }
        }
    }
}
