//! Whether a claim that is held for a kubelet is still needed, by what the API server said; and for how long it has not been. Pure.
//!
//! A claim is never unprepared while a pod of this node may use it: one for which it is reserved now, or was when it was prepared, or
//! that names it. A kubelet does not prepare a claim again for a second pod, so the consumers at the prepare are never all of them. What
//! is not known counts as use.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use nodedock_model::{Consumer, KubeletClaim, ObjectName, Uid};

/// Time and number of checks after which a claim without consumers is unprepared: a kubelet does it itself within a minute or two.
pub(crate) const RECONCILE_DELAY: Duration = Duration::from_secs(300);
pub(crate) const RECONCILE_LOOKS_MIN: u32 = 3;

/// A pod that is bound to this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NodePod {
    pub namespace: ObjectName,
    pub uid: Uid,
    /// All its containers have ended for good.
    pub finished: bool,
    /// Claims that it names, in its spec or its status.
    pub claims: Vec<ObjectName>,
}

/// The state of a claim's object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ClaimState {
    Unknown,
    /// Also while it is being deleted.
    Present {
        reserved_for: Vec<Consumer>,
    },
    /// The API server says that there is none of that name.
    Gone,
    /// Another has its name.
    Replaced {
        reserved_for: Vec<Consumer>,
    },
}

/// Why no pod needs a claim any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    Gone,
    Replaced,
    NoPods,
}

impl Why {
    pub fn words(self) -> &'static str {
        match self {
            Self::Gone => "its ResourceClaim is gone",
            Self::Replaced => "its ResourceClaim is gone, and another has its name",
            Self::NoPods => "its consumers are gone",
        }
    }
}

/// Whether a pod of this node uses the claim, by the list of its pods and by the prepare alone.
pub(super) fn is_used_here(held: &KubeletClaim, pods: &[NodePod]) -> bool {
    let reserved = |pod: &NodePod| held.consumers.iter().any(|consumer| consumer.uid == pod.uid);
    pods.iter().any(|pod| !pod.finished && (reserved(pod) || names(pod, held)))
}

fn names(pod: &NodePod, held: &KubeletClaim) -> bool {
    pod.namespace == held.claim.namespace && pod.claims.contains(&held.claim.name)
}

/// Pods that have to be read: the claim is reserved for them, and they are not among those of this node.
pub(super) fn unseen<'a>(state: &'a ClaimState, pods: &'a [NodePod]) -> impl Iterator<Item = &'a Consumer> {
    let reserved_for = match state {
        ClaimState::Present { reserved_for } => reserved_for.as_slice(),
        _ => &[],
    };
    reserved_for.iter().filter(|c| c.is_pod() && !pods.iter().any(|pod| pod.uid == c.uid))
}

/// Returns why the claim is abandoned; None: it is used, or that is not known. `elsewhere`: the pods of those that `unseen` names that are
/// gone, have ended or are bound to another node.
pub(super) fn abandoned(
    held: &KubeletClaim,
    state: &ClaimState,
    pods: &[NodePod],
    elsewhere: &BTreeSet<Uid>,
) -> Option<Why> {
    let is_for = |pod: &NodePod, consumers: &[Consumer]| consumers.iter().any(|c| c.uid == pod.uid);
    let is_live = |is_used: &dyn Fn(&NodePod) -> bool| pods.iter().any(|pod| !pod.finished && is_used(pod));
    let (why, is_used) = match state {
        ClaimState::Unknown => return None,
        ClaimState::Gone => (Why::Gone, is_live(&|pod| names(pod, held))),
        // A pod that names it means the new one only where that is reserved for it.
        ClaimState::Replaced { reserved_for } => {
            (Why::Replaced, is_live(&|pod| names(pod, held) && !is_for(pod, reserved_for)))
        }
        ClaimState::Present { reserved_for } => {
            let needs = |consumer: &Consumer| match pods.iter().find(|pod| pod.uid == consumer.uid) {
                Some(pod) => !pod.finished,
                // Of other consumers it is not known whether they are on this node.
                None => !consumer.is_pod() || !elsewhere.contains(&consumer.uid),
            };
            (Why::NoPods, is_live(&|pod| names(pod, held)) || reserved_for.iter().any(needs))
        }
    };
    let is_prepared_for = is_live(&|pod| is_for(pod, &held.consumers));
    (!is_used && !is_prepared_for).then_some(why)
}

/// For how long each claim was seen abandoned, in each round. It is abandoned for good when it was seen so for a while and in several
/// rounds: a process that was stopped for an hour saw nothing of it.
#[derive(Debug, Default)]
pub(super) struct AbandonedClaims(BTreeMap<Uid, Seen>);

#[derive(Debug)]
struct Seen {
    since: Instant,
    rounds: u32,
}

impl AbandonedClaims {
    /// Learns what a round found; claims that are not in it count as used. Returns those to be unprepared.
    pub(super) fn learn(&mut self, abandoned: &[Uid], now: Instant) -> Vec<Uid> {
        self.0.retain(|uid, _| abandoned.contains(uid));
        let is_over = |uid: &&Uid| {
            let seen = self.0.entry((*uid).clone()).or_insert(Seen { since: now, rounds: 0 });
            seen.rounds = seen.rounds.saturating_add(1);
            let is_long = now.saturating_duration_since(seen.since) >= RECONCILE_DELAY;
            is_long && seen.rounds >= RECONCILE_LOOKS_MIN
        };
        abandoned.iter().filter(is_over).cloned().collect()
    }

    /// After a round that saw nothing, what was seen before proves nothing any more.
    pub(super) fn forget(&mut self) {
        self.0.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;
    use nodedock_model::ObjectRef;

    fn uid(text: &str) -> Uid {
        Uid::new(text).unwrap()
    }

    fn name(text: &str) -> ObjectName {
        ObjectName::new(text).unwrap()
    }

    fn consumer(pod: &str) -> Consumer {
        Consumer { api_group: String::new(), resource: "pods".to_owned(), name: name(pod), uid: uid(pod) }
    }

    fn held(consumers: &[&str]) -> KubeletClaim {
        KubeletClaim {
            claim: ObjectRef::new("default", "c", "uid-c").unwrap(),
            drivers: Vec::new(),
            consumers: consumers.iter().map(|pod| consumer(pod)).collect(),
            since_ms: 0,
        }
    }

    fn pod(id: &str, claims: &[&str]) -> NodePod {
        NodePod {
            namespace: name("default"),
            uid: uid(id),
            finished: false,
            claims: claims.iter().map(|claim| name(claim)).collect(),
        }
    }

    fn here(pods: &[&str]) -> ClaimState {
        ClaimState::Present { reserved_for: pods.iter().map(|pod| consumer(pod)).collect() }
    }

    fn judged(held: &KubeletClaim, state: &ClaimState, pods: &[NodePod], elsewhere: &[&str]) -> Option<Why> {
        abandoned(held, state, pods, &elsewhere.iter().map(|pod| uid(pod)).collect())
    }

    #[test]
    fn a_claim_without_an_object_and_without_pods_is_abandoned() {
        let replaced = ClaimState::Replaced { reserved_for: vec![consumer("new")] };
        assert_eq!(judged(&held(&["a"]), &ClaimState::Gone, &[], &[]), Some(Why::Gone));
        assert_eq!(judged(&held(&["a"]), &replaced, &[], &[]), Some(Why::Replaced));
        assert_eq!(judged(&held(&["a"]), &replaced, &[pod("new", &["c"])], &[]), Some(Why::Replaced));
        assert_eq!(judged(&held(&["a"]), &replaced, &[pod("second", &["c"])], &[]), None);
        assert_eq!(judged(&held(&["a"]), &here(&[]), &[], &[]), Some(Why::NoPods));
        assert_eq!(judged(&held(&["a"]), &ClaimState::Unknown, &[], &[]), None);
        assert_eq!(judged(&held(&["a"]), &ClaimState::Gone, &[pod("a", &[])], &[]), None);
        assert_eq!(judged(&held(&[]), &ClaimState::Gone, &[pod("b", &["c"])], &[]), None);
    }

    #[test]
    fn pods_that_are_not_of_this_node_count_until_it_is_known_that_they_do_not_come() {
        let claim = held(&["a"]);
        assert_eq!(judged(&claim, &here(&["b"]), &[], &[]), None);
        assert_eq!(judged(&claim, &here(&["b"]), &[], &["b"]), Some(Why::NoPods));
        let mut other = consumer("g");
        other.resource = "podgroups".to_owned();
        let state = ClaimState::Present { reserved_for: vec![other] };
        assert_eq!(unseen(&state, &[]).count(), 0);
        assert_eq!(judged(&claim, &state, &[], &["g"]), None);
        // A claim of a group of pods (KEP-5729) is needed until its object names the group no more.
        let ClaimState::Present { reserved_for } = state.clone() else { unreachable!("it is present") };
        let of_group = KubeletClaim { consumers: reserved_for, ..held(&[]) };
        assert_eq!(judged(&of_group, &state, &[], &[]), None);
        assert_eq!(judged(&of_group, &here(&[]), &[pod("member", &["c"])], &[]), None);
        assert_eq!(judged(&of_group, &here(&[]), &[], &[]), Some(Why::NoPods));
        assert_eq!(judged(&of_group, &ClaimState::Gone, &[], &[]), Some(Why::Gone));
        let mut ended = pod("a", &["c"]);
        ended.finished = true;
        assert_eq!(judged(&claim, &here(&["a"]), &[ended.clone()], &[]), Some(Why::NoPods));
        assert!(!is_used_here(&claim, &[ended]) && is_used_here(&claim, &[pod("x", &["c"])]));
        let mut elsewhere = pod("x", &["c"]);
        elsewhere.namespace = name("other");
        assert!(!is_used_here(&claim, &[elsewhere]));
    }

    #[test]
    fn only_what_is_seen_abandoned_for_the_whole_time_is_unprepared() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut abandoned = AbandonedClaims::default();
        let (a, b) = (uid("a"), uid("b"));
        assert!(abandoned.learn(&[a.clone(), b.clone()], at(0)).is_empty());
        assert!(abandoned.learn(std::slice::from_ref(&a), at(120)).is_empty());
        assert!(abandoned.learn(&[a.clone(), b.clone()], at(299)).is_empty());
        assert_eq!(abandoned.learn(&[a.clone(), b.clone()], at(300)), std::slice::from_ref(&a));
        // Until it is gone it is tried each time.
        assert_eq!(abandoned.learn(std::slice::from_ref(&a), at(310)), std::slice::from_ref(&a));
        abandoned.forget();
        assert!(abandoned.is_empty() && abandoned.learn(std::slice::from_ref(&a), at(320)).is_empty());
        // Two looks with an hour between them are no long look.
        assert!(abandoned.learn(std::slice::from_ref(&a), at(4000)).is_empty());
        assert_eq!(abandoned.learn(std::slice::from_ref(&a), at(4001)), [a]);
    }

    fn states() -> impl Strategy<Value = ClaimState> {
        let reserved = proptest::collection::vec(0usize..5, 0..4);
        let reserved = reserved
            .prop_map(|pods| pods.into_iter().map(|i| consumer(&format!("p{i}"))).collect::<Vec<_>>());
        prop_oneof![
            Just(ClaimState::Unknown),
            Just(ClaimState::Gone),
            reserved.clone().prop_map(|reserved_for| ClaimState::Present { reserved_for }),
            reserved.prop_map(|reserved_for| ClaimState::Replaced { reserved_for }),
        ]
    }

    proptest! {
        /// Pods here, pods elsewhere, what was known at the prepare and what the API says now, in any combination: a claim that a live
        /// pod of this node may use is never abandoned, and what is seen without asking further agrees with the whole.
        #[test]
        fn a_claim_of_a_live_pod_is_never_abandoned(
            state in states(),
            prepared_for in proptest::collection::vec(0usize..5, 0..3),
            here in proptest::collection::vec((0usize..5, any::<bool>(), any::<bool>(), any::<bool>()), 0..5),
            elsewhere in proptest::collection::vec(0usize..5, 0..5),
        ) {
            let consumers: Vec<_> = prepared_for.iter().map(|i| format!("p{i}")).collect();
            let held = held(&consumers.iter().map(String::as_str).collect::<Vec<_>>());
            let mut pods: Vec<NodePod> = Vec::new();
            for (i, finished, names, same_namespace) in here {
                let mut pod = pod(&format!("p{i}"), if names { &["c"] } else { &["d"] });
                pod.finished = finished;
                if !same_namespace {
                    pod.namespace = name("other");
                }
                if !pods.iter().any(|known| known.uid == pod.uid) {
                    pods.push(pod);
                }
            }
            let elsewhere = elsewhere.iter().map(|i| uid(&format!("p{i}"))).collect();
            let verdict = abandoned(&held, &state, &pods, &elsewhere);
            let reserved_now: Vec<_> = match &state {
                ClaimState::Present { reserved_for } => reserved_for.clone(),
                _ => Vec::new(),
            };
            let new: Vec<_> = match &state {
                ClaimState::Replaced { reserved_for } => reserved_for.clone(),
                _ => Vec::new(),
            };
            for pod in pods.iter().filter(|pod| !pod.finished) {
                let prepared = held.consumers.iter().any(|c| c.uid == pod.uid);
                let reserved = reserved_now.iter().any(|c| c.uid == pod.uid);
                let uses_new = new.iter().any(|c| c.uid == pod.uid);
                let named = pod.namespace == held.claim.namespace && pod.claims.contains(&held.claim.name);
                if prepared || reserved || (named && !uses_new) {
                    prop_assert_eq!(verdict, None);
                }
            }
            for consumer in unseen(&state, &pods) {
                if !elsewhere.contains(&consumer.uid) {
                    prop_assert_eq!(verdict, None);
                }
            }
            if state == ClaimState::Unknown {
                prop_assert_eq!(verdict, None);
            }
        }
    }
}
