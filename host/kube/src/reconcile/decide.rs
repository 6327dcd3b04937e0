//! Decision whether a claim that is held for a kubelet is still needed, by the answers of the API server, and for how long it has not been
//! needed. Pure.
//!
//! A claim is never unprepared while a pod of this node may use it: one for which it is reserved now, or was when it was prepared, or that
//! names it. A kubelet does not prepare a claim again for a second pod, so the consumers at the prepare are never all of them. An unknown
//! state counts as use.
//!
//! A claim can be reserved for a group of pods instead of for each of them. A pod has the name of its group and not its UID, so a pod of
//! this node counts for every group of that name. Any pod of the group may be bound to this node at any time: while the claim is reserved
//! for the group, or for any other consumer that is not a pod, it is used, regardless of the pods that exist.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use nodedock_model::{Consumer, KubeletClaim, ObjectName, Uid};

/// Time and number of checks after which a claim without consumers is unprepared: a kubelet does it itself within a minute or two.
pub(crate) const RECONCILE_DELAY: Duration = Duration::from_secs(300);
pub(crate) const RECONCILE_LOOKS_MIN: u32 = 3;

/// Pods of the node's list: a kubelet usually has 110.
pub(super) const NODE_PODS_MAX: usize = 10_000;

/// A pod of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodePod {
    pub namespace: ObjectName,
    pub uid: Uid,
    /// Name of the group that it belongs to.
    pub group: Option<ObjectName>,
    /// All its containers have ended for good.
    pub finished: bool,
    /// Claims that it names, in its spec or its status.
    pub claims: Vec<ObjectName>,
}

/// Returns whether all containers of a pod of this phase have ended for good.
pub(super) fn is_finished(phase: &str) -> bool {
    matches!(phase, "Succeeded" | "Failed")
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

/// Why a claim is not needed any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    Gone,
    Replaced,
    NoConsumers,
}

impl Why {
    pub fn words(self) -> &'static str {
        match self {
            Self::Gone => "its ResourceClaim is gone",
            Self::Replaced => "its ResourceClaim is gone, and another has its name",
            Self::NoConsumers => "its consumers are gone",
        }
    }
}

/// Returns whether a pod of this node uses the claim, by the list of its pods and by the prepare alone.
pub(super) fn is_used_here(held: &KubeletClaim, pods: &[NodePod]) -> bool {
    pods.iter()
        .any(|pod| !pod.finished && (is_among(pod, held, &held.consumers) || names(pod, held)))
}

/// Returns whether a claim that has these consumers is reserved for the pod, or for its group.
fn is_among(pod: &NodePod, held: &KubeletClaim, consumers: &[Consumer]) -> bool {
    let group = pod
        .group
        .as_ref()
        .filter(|_| pod.namespace == held.claim.namespace);
    consumers.iter().any(|consumer| {
        consumer.uid == pod.uid || group.is_some_and(|group| consumer.is_pod_group(group))
    })
}

fn names(pod: &NodePod, held: &KubeletClaim) -> bool {
    pod.namespace == held.claim.namespace && pod.claims.contains(&held.claim.name)
}

/// Pods that have to be read: the claim is reserved for them, and they are not among those of this node.
pub(super) fn unseen<'a>(
    state: &'a ClaimState,
    pods: &'a [NodePod],
) -> impl Iterator<Item = &'a Consumer> {
    let reserved_for = match state {
        ClaimState::Present { reserved_for } => reserved_for.as_slice(),
        _ => &[],
    };
    reserved_for
        .iter()
        .filter(|c| c.is_pod() && !pods.iter().any(|pod| pod.uid == c.uid))
}

/// Returns why the claim is abandoned; None: it is used, or that is not known. `elsewhere`: the pods of those that `unseen` names that are
/// gone, have ended or are bound to another node.
pub(super) fn abandoned(
    held: &KubeletClaim,
    state: &ClaimState,
    pods: &[NodePod],
    elsewhere: &BTreeSet<Uid>,
) -> Option<Why> {
    let mut live = pods.iter().filter(|pod| !pod.finished);
    let is_named = live.clone().any(|pod| names(pod, held));
    let (why, is_used) = match state {
        ClaimState::Unknown => return None,
        ClaimState::Gone => (Why::Gone, is_named),
        // A pod that names it means the new one only where that is reserved for it.
        ClaimState::Replaced { reserved_for } => (
            Why::Replaced,
            live.clone()
                .any(|pod| names(pod, held) && !is_among(pod, held, reserved_for)),
        ),
        ClaimState::Present { reserved_for } => {
            let is_needed = reserved_for.iter().any(|consumer| {
                match pods.iter().find(|pod| pod.uid == consumer.uid) {
                    Some(pod) => !pod.finished,
                    // Of other consumers it is not known whether they are on this node.
                    None => !consumer.is_pod() || !elsewhere.contains(&consumer.uid),
                }
            });
            (Why::NoConsumers, is_named || is_needed)
        }
    };
    let is_prepared_for = live.any(|pod| is_among(pod, held, &held.consumers));
    (!is_used && !is_prepared_for).then_some(why)
}

/// Time for which each claim was seen abandoned, in each round. It is abandoned for good when it was seen so for a while and in several
/// rounds: a process that was stopped for an hour saw nothing of it.
#[derive(Debug, Default)]
pub(super) struct AbandonedClaims(BTreeMap<Uid, AbandonedSince>);

#[derive(Debug)]
struct AbandonedSince {
    since: Instant,
    rounds: u32,
}

impl AbandonedClaims {
    /// Learns what a round found; claims that are not in it count as used. Returns those to be unprepared.
    pub(super) fn learn(&mut self, abandoned: &[Uid], now: Instant) -> Vec<Uid> {
        self.0.retain(|uid, _| abandoned.contains(uid));
        let over = abandoned.iter().filter(|uid| {
            let seen = self.0.entry((*uid).clone()).or_insert(AbandonedSince {
                since: now,
                rounds: 0,
            });
            seen.rounds = seen.rounds.saturating_add(1);
            let is_long = now.saturating_duration_since(seen.since) >= RECONCILE_DELAY;
            is_long && seen.rounds >= RECONCILE_LOOKS_MIN
        });
        over.cloned().collect()
    }

    /// Discards earlier observations: after a round that could not observe they prove nothing any more.
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
        Consumer {
            api_group: String::new(),
            resource: "pods".to_owned(),
            name: name(pod),
            uid: uid(pod),
        }
    }

    fn held(consumers: &[&str]) -> KubeletClaim {
        KubeletClaim {
            claim: ObjectRef::new("default", "c", "uid-c").unwrap(),
            drivers: Vec::new(),
            consumers: consumers.iter().map(|pod| consumer(pod)).collect(),
            since_ms: 0,
            last_request: None,
            early: false,
        }
    }

    fn group(name_of: &str, uid_of: &str) -> Consumer {
        let (api_group, resource) = ("scheduling.k8s.io".to_owned(), "podgroups".to_owned());
        Consumer {
            api_group,
            resource,
            name: name(name_of),
            uid: uid(uid_of),
        }
    }

    fn member(id: &str, group: &str, claims: &[&str]) -> NodePod {
        NodePod {
            group: Some(name(group)),
            ..pod(id, claims)
        }
    }

    fn pod(id: &str, claims: &[&str]) -> NodePod {
        NodePod {
            namespace: name("default"),
            uid: uid(id),
            group: None,
            finished: false,
            claims: claims.iter().map(|claim| name(claim)).collect(),
        }
    }

    fn here(pods: &[&str]) -> ClaimState {
        ClaimState::Present {
            reserved_for: pods.iter().map(|pod| consumer(pod)).collect(),
        }
    }

    fn judged(
        held: &KubeletClaim,
        state: &ClaimState,
        pods: &[NodePod],
        elsewhere: &[&str],
    ) -> Option<Why> {
        abandoned(
            held,
            state,
            pods,
            &elsewhere.iter().map(|pod| uid(pod)).collect(),
        )
    }

    #[test]
    fn claim_without_consumers_is_abandoned() {
        let replaced = ClaimState::Replaced {
            reserved_for: vec![consumer("new")],
        };
        assert_eq!(
            judged(&held(&["a"]), &ClaimState::Gone, &[], &[]),
            Some(Why::Gone)
        );
        assert_eq!(
            judged(&held(&["a"]), &replaced, &[], &[]),
            Some(Why::Replaced)
        );
        assert_eq!(
            judged(&held(&["a"]), &replaced, &[pod("new", &["c"])], &[]),
            Some(Why::Replaced)
        );
        assert_eq!(
            judged(&held(&["a"]), &replaced, &[pod("second", &["c"])], &[]),
            None
        );
        assert_eq!(
            judged(&held(&["a"]), &here(&[]), &[], &[]),
            Some(Why::NoConsumers)
        );
        assert_eq!(judged(&held(&["a"]), &ClaimState::Unknown, &[], &[]), None);
        assert_eq!(
            judged(&held(&["a"]), &ClaimState::Gone, &[pod("a", &[])], &[]),
            None
        );
        assert_eq!(
            judged(&held(&[]), &ClaimState::Gone, &[pod("b", &["c"])], &[]),
            None
        );
    }

    #[test]
    fn other_pods_count_until_ruled_out() {
        let claim = held(&["a"]);
        assert_eq!(judged(&claim, &here(&["b"]), &[], &[]), None);
        assert_eq!(
            judged(&claim, &here(&["b"]), &[], &["b"]),
            Some(Why::NoConsumers)
        );
        let mut ended = pod("a", &["c"]);
        ended.finished = true;
        assert_eq!(
            judged(&claim, &here(&["a"]), &[ended.clone()], &[]),
            Some(Why::NoConsumers)
        );
        assert!(!is_used_here(&claim, &[ended]) && is_used_here(&claim, &[pod("x", &["c"])]));
        let mut elsewhere = pod("x", &["c"]);
        elsewhere.namespace = name("other");
        assert!(!is_used_here(&claim, &[elsewhere]));
    }

    #[test]
    fn group_claim_is_used_while_reserved() {
        let of_group = KubeletClaim {
            consumers: vec![group("g", "uid-g")],
            ..held(&[])
        };
        let reserved = |consumers: &[Consumer]| ClaimState::Present {
            reserved_for: consumers.to_vec(),
        };
        let for_group = reserved(&[group("g", "uid-g")]);
        assert_eq!(unseen(&for_group, &[]).count(), 0);
        for state in [&for_group, &reserved(&[group("g", "uid-g"), consumer("b")])] {
            assert_eq!(judged(&of_group, state, &[], &["b", "uid-g"]), None);
        }
        assert_eq!(
            judged(&held(&["a"]), &for_group, &[], &[]),
            None,
            "its pods may come"
        );
        assert_eq!(
            judged(&of_group, &here(&[]), &[], &[]),
            Some(Why::NoConsumers)
        );
        assert_eq!(judged(&of_group, &here(&["b"]), &[], &[]), None);
        assert_eq!(
            judged(&of_group, &here(&["b"]), &[], &["b"]),
            Some(Why::NoConsumers)
        );
        assert_eq!(
            judged(&of_group, &ClaimState::Gone, &[], &[]),
            Some(Why::Gone)
        );
        // A group that was removed by force does not end its pods, which need not name the claim.
        for state in [here(&[]), ClaimState::Gone, here(&["b"])] {
            assert_eq!(
                judged(&of_group, &state, &[member("a", "g", &[])], &["b"]),
                None,
                "{state:?}"
            );
            assert_eq!(
                judged(&of_group, &state, &[pod("a", &["c"])], &["b"]),
                None,
                "{state:?}"
            );
            let mut others = [
                member("d", "h", &[]),
                member("e", "g", &[]),
                member("f", "g", &["c"]),
            ];
            others[1].namespace = name("other");
            others[2].finished = true;
            assert!(
                judged(&of_group, &state, &others, &["b"]).is_some(),
                "{state:?}"
            );
        }
        assert!(is_used_here(&of_group, &[member("a", "g", &[])]));
        assert!(!is_used_here(&of_group, &[member("a", "h", &[])]));
        // Another claim of the name: its group's pods mean that one, unless they may be of the old group.
        let replaced = ClaimState::Replaced {
            reserved_for: vec![group("new", "uid-new")],
        };
        assert_eq!(
            judged(&of_group, &replaced, &[member("a", "new", &["c"])], &[]),
            Some(Why::Replaced)
        );
        assert_eq!(
            judged(&of_group, &replaced, &[member("a", "g", &["c"])], &[]),
            None
        );
        let same_name = ClaimState::Replaced {
            reserved_for: vec![group("g", "uid-new")],
        };
        assert_eq!(
            judged(&of_group, &same_name, &[member("a", "g", &["c"])], &[]),
            None
        );
        // A consumer of a kind that nothing is known of.
        let other = Consumer {
            api_group: "example.com".to_owned(),
            ..group("g", "uid-x")
        };
        let of_other = KubeletClaim {
            consumers: vec![other.clone()],
            ..held(&[])
        };
        assert_eq!(
            judged(&of_other, &reserved(&[other]), &[], &["uid-x"]),
            None
        );
        assert_eq!(
            judged(&of_other, &here(&[]), &[member("a", "g", &[])], &[]),
            Some(Why::NoConsumers)
        );
    }

    #[test]
    fn only_persistently_abandoned_claims_are_unprepared() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut abandoned = AbandonedClaims::default();
        let (a, b) = (uid("a"), uid("b"));
        assert!(abandoned.learn(&[a.clone(), b.clone()], at(0)).is_empty());
        assert!(
            abandoned
                .learn(std::slice::from_ref(&a), at(120))
                .is_empty()
        );
        assert!(abandoned.learn(&[a.clone(), b.clone()], at(299)).is_empty());
        assert_eq!(
            abandoned.learn(&[a.clone(), b.clone()], at(300)),
            std::slice::from_ref(&a)
        );
        // Until it is gone it is tried each time.
        assert_eq!(
            abandoned.learn(std::slice::from_ref(&a), at(310)),
            std::slice::from_ref(&a)
        );
        abandoned.forget();
        assert!(
            abandoned.is_empty()
                && abandoned
                    .learn(std::slice::from_ref(&a), at(320))
                    .is_empty()
        );
        // Two looks with an hour between them are no long look.
        assert!(
            abandoned
                .learn(std::slice::from_ref(&a), at(4000))
                .is_empty()
        );
        assert_eq!(abandoned.learn(std::slice::from_ref(&a), at(4001)), [a]);
    }

    /// A pod, a group, or another kind with the name of a group.
    fn any_consumer() -> impl Strategy<Value = Consumer> {
        let other = |i| Consumer {
            api_group: "example.com".to_owned(),
            ..group(&format!("g{i}"), "other")
        };
        prop_oneof![
            6 => (0usize..5).prop_map(|i| consumer(&format!("p{i}"))),
            3 => (0usize..3).prop_map(|i| group(&format!("g{i}"), &format!("uid-g{i}"))),
            1 => (0usize..3).prop_map(other),
        ]
    }

    fn states() -> impl Strategy<Value = ClaimState> {
        let reserved = proptest::collection::vec(any_consumer(), 0..4).boxed();
        prop_oneof![
            Just(ClaimState::Unknown),
            Just(ClaimState::Gone),
            reserved
                .clone()
                .prop_map(|reserved_for| ClaimState::Present { reserved_for }),
            reserved.prop_map(|reserved_for| ClaimState::Replaced { reserved_for }),
        ]
    }

    proptest! {
        /// Pods here, pods elsewhere, what was known at the prepare and what the API says now, in any combination: a claim that a live
        /// pod of this node may use is never abandoned, and what is seen without asking further agrees with the whole.
        #[test]
        fn live_pods_claim_is_never_abandoned(
            state in states(),
            consumers in proptest::collection::vec(any_consumer(), 0..3),
            here in proptest::collection::vec(
                (0usize..5, proptest::option::of(0usize..3), any::<bool>(), any::<bool>(), any::<bool>()), 0..5
            ),
            elsewhere in proptest::collection::vec(0usize..5, 0..5),
        ) {
            let held = KubeletClaim { consumers, ..held(&[]) };
            let mut pods: Vec<NodePod> = Vec::new();
            for (i, group, finished, names, same_namespace) in here {
                let mut pod = pod(&format!("p{i}"), if names { &["c"] } else { &["d"] });
                pod.finished = finished;
                pod.group = group.map(|group| name(&format!("g{group}")));
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
                let has = |consumers: &[Consumer]| consumers.iter().any(|c| {
                    let is_of_group = pod.group.as_ref() == Some(&c.name) && c.resource == "podgroups";
                    let is_of_group = is_of_group && c.api_group == "scheduling.k8s.io";
                    c.uid == pod.uid || (is_of_group && pod.namespace == held.claim.namespace)
                });
                let (prepared, reserved) = (has(&held.consumers), has(&reserved_now));
                let uses_new = has(&new);
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
            if state == ClaimState::Unknown || reserved_now.iter().any(|consumer| !consumer.is_pod()) {
                prop_assert_eq!(verdict, None);
            }
            // Nothing else keeps it.
            let is_here = pods.iter().any(|pod| !pod.finished);
            let is_stated = match &state {
                ClaimState::Unknown => false,
                ClaimState::Present { reserved_for } => reserved_for.is_empty(),
                ClaimState::Gone | ClaimState::Replaced { .. } => true,
            };
            if is_stated && !is_here {
                prop_assert!(verdict.is_some());
            }
        }
    }
}
