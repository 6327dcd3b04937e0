//! Which claims answer an Allocate: those that stand already, and a new one for what is left. Pure.
//!
//! A kubelet gives a device to one pod at a time, so what an earlier claim has of the wanted devices is either of the same pod (its
//! init containers' devices serve its later containers, in any combination), or of a pod that is gone. Which of the two is told by
//! time, a pod is admitted as a whole, and by the kubelet's list of the devices that pods have.

use super::claim::Ids;
use nodedock_model::ObjectRef;

/// A claim that stands for earlier devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Earlier {
    pub(super) claim: ObjectRef,
    pub(super) devices: Ids,
    /// It was asked for within `limit::ADMISSION`.
    pub(super) is_fresh: bool,
    /// Whether a pod has any of its devices, by the kubelet's list; none: it is not known.
    pub(super) is_used: Option<bool>,
}

impl Earlier {
    /// Whether nobody can have it any more.
    fn is_idle(&self) -> bool {
        !self.is_fresh && self.is_used == Some(false)
    }
}

/// What an Allocate comes to.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// Claims that nobody has any more: given up first.
    pub(super) give_up: Vec<Earlier>,
    /// Claims that serve again, with the devices that are wanted of each.
    pub(super) join: Vec<(Earlier, Ids)>,
    /// Devices for a new claim.
    pub(super) new: Ids,
}

/// Whether the plan depends on which devices pods have.
pub(super) fn depends_on_pods(wanted: &Ids, earlier: &[Earlier]) -> bool {
    earlier.iter().any(|claim| !claim.is_fresh && !claim.devices.is_disjoint(wanted))
}

/// What becomes of the wanted devices. What may still be somebody's is not given up, it serves again.
pub(super) fn plan(wanted: &Ids, earlier: &[Earlier]) -> Plan {
    let mut touched: Vec<_> = earlier.iter().filter(|claim| !claim.devices.is_disjoint(wanted)).collect();
    // The claim of the very same devices needs no other.
    touched.sort_by_key(|claim| (claim.devices != *wanted, claim.claim.clone()));
    let mut plan = Plan { new: wanted.clone(), ..Plan::default() };
    for claim in touched {
        if claim.is_idle() {
            plan.give_up.push(claim.clone());
            continue;
        }
        let shared: Ids = plan.new.intersection(&claim.devices).cloned().collect();
        if !shared.is_empty() {
            plan.new.retain(|id| !shared.contains(id));
            plan.join.push((claim.clone(), shared));
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn ids(ids: &str) -> Ids {
        ids.chars().map(|id| format!("p/{id}")).collect()
    }

    fn earlier(devices: &str, is_fresh: bool) -> Earlier {
        let claim = ObjectRef::new("nodedock", &format!("c-{devices}"), &format!("u-{devices}")).unwrap();
        Earlier { claim, devices: ids(devices), is_fresh, is_used: None }
    }

    fn with_use(claims: &[Earlier], in_use: Option<&Ids>) -> Vec<Earlier> {
        let is_used = |claim: &Earlier| in_use.map(|in_use| !claim.devices.is_disjoint(in_use));
        claims.iter().map(|claim| Earlier { is_used: is_used(claim), ..claim.clone() }).collect()
    }

    /// Given up, joined (with what of it), new; each as letters.
    fn planned(wanted: &str, claims: &[Earlier], in_use: Option<&str>) -> (String, String, String) {
        let plan = plan(&ids(wanted), &with_use(claims, in_use.map(ids).as_ref()));
        let letters = |ids: &Ids| ids.iter().map(|id| &id[2..]).collect::<String>();
        let given: Vec<_> = plan.give_up.iter().map(|claim| letters(&claim.devices)).collect();
        let joined: Vec<_> = plan
            .join
            .iter()
            .map(|(claim, of)| format!("{}:{}", letters(&claim.devices), letters(of)))
            .collect();
        (given.join(" "), joined.join(" "), letters(&plan.new))
    }

    #[test]
    fn containers_of_one_pod_share_claims_and_those_of_gone_pods_are_given_up() {
        let of = |given: &str, joined: &str, new: &str| (given.to_owned(), joined.to_owned(), new.to_owned());
        let (new, old) = (|devices| earlier(devices, true), |devices| earlier(devices, false));
        for (wanted, claims, in_use, expected) in [
            ("ab", vec![], None, of("", "", "ab")),
            ("ab", vec![new("cd")], Some(""), of("", "", "ab")),
            // The same again; a part; more; of two.
            ("ab", vec![new("ab")], None, of("", "ab:ab", "")),
            ("a", vec![new("ab")], None, of("", "ab:a", "")),
            ("abc", vec![new("ab")], None, of("", "ab:ab", "c")),
            ("bc", vec![new("ab"), new("cd")], None, of("", "ab:b cd:c", "")),
            // Of a pod that is gone, and of one that perhaps is not.
            ("ab", vec![old("ab")], Some(""), of("ab", "", "ab")),
            ("ab", vec![old("ab")], None, of("", "ab:ab", "")),
            ("ab", vec![old("ab")], Some("a"), of("", "ab:ab", "")),
            ("bc", vec![old("ab"), new("cd")], Some(""), of("ab", "cd:c", "b")),
            ("b", vec![old("ab")], Some("a"), of("", "ab:b", "")),
        ] {
            assert_eq!(planned(wanted, &claims, in_use), expected, "{wanted} {claims:?} {in_use:?}");
        }
        assert!(!depends_on_pods(&ids("a"), &[new("ab"), old("c")]));
        assert!(depends_on_pods(&ids("a"), &[new("b"), old("ac")]));
    }

    proptest! {
        #[test]
        fn every_device_is_served_once_and_nothing_in_use_is_given_up(
            wanted in "[a-h]{1,5}",
            claims in prop::collection::vec(("[a-h]{1,4}", any::<bool>()), 0..5),
            in_use in prop::option::of("[a-h]{0,5}"),
        ) {
            let claims: Vec<_> = claims.iter().map(|(devices, fresh)| earlier(devices, *fresh)).collect();
            let in_use = in_use.as_deref().map(ids);
            let plan = plan(&ids(&wanted), &with_use(&claims, in_use.as_ref()));
            let mut served: Vec<_> = plan.join.iter().flat_map(|(_, of)| of).chain(&plan.new).cloned().collect();
            let count = served.len();
            served.sort();
            served.dedup();
            prop_assert_eq!(count, served.len());
            prop_assert_eq!(served.into_iter().collect::<BTreeSet<_>>(), ids(&wanted));
            for claim in &plan.give_up {
                prop_assert!(!claim.is_fresh);
                prop_assert!(in_use.as_ref().is_some_and(|in_use| in_use.is_disjoint(&claim.devices)));
            }
            for (claim, of) in &plan.join {
                prop_assert!(of.is_subset(&claim.devices) && !of.is_empty());
                prop_assert!(!plan.give_up.contains(claim));
            }
        }
    }
}
