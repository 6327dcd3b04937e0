//! Events on claims of the local API that wait for devices, and on the pods that use them, as Kubernetes' scheduler publishes them; and on pods whose
//! claims cannot be made of their templates, as its controller of claims does.
//!
//! Given the claims that wait after each decision, one task writes one Event for each claim and each of its pods, and for each claim of a pod that is not made. The Event has the newest
//! reason and counts how often the claim was refused. A claim that gets its devices at once has no Event, and writes have a bounded rate: what
//! changes in between is in the next one. None is dropped, as those of `crate::events` are when there are too many: a claim waits as long as it takes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use nodedock_allocator::allocate::NotAllocated;
use tokio::time::{Instant, sleep, sleep_until};

use super::{LocalClaims, UnmadeClaim, WaitingClaim};
use crate::client::{ApiError, ErrorKind};
use crate::events::{EVENT_MESSAGE_BYTES_MAX, EventWriter, of_claim, reference, warning};
use nodedock_base::printable::one_line;
use nodedock_base::rate::TokenBucket;
use nodedock_model::ObjectRef;

/// Reason and action of an Event.
type Reason = (&'static str, &'static str);

/// What the scheduler's Events about a pod that cannot run have, here of its claims too.
const NOT_ALLOCATED: Reason = ("FailedScheduling", "Scheduling");
/// What the Events of Kubernetes' controller of claims have.
const NOT_MADE: Reason = ("FailedResourceClaimCreation", "Creating");

/// Time that a claim waits before it has an Event.
const WAIT_MIN: Duration = Duration::from_secs(1);
/// Interval of the writes of one Event.
const UPDATE_EVERY: Duration = Duration::from_secs(10);
/// Interval of the writes of an Event of which nothing changes: an API deletes Events an hour after their last write.
const REPEAT_EVERY: Duration = Duration::from_secs(30 * 60);
/// Pause after a write that failed.
const RETRY_EVERY: Duration = Duration::from_secs(10);
/// Interval of looks at the claims, each of which may follow many decisions.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Burst of writes, and their rate: an Event stays in the checkpoint for an hour.
const WRITES_BURST: u32 = 100;
const WRITES_PER_SECOND: u32 = 1;

/// Claims that an Event names as holders.
const HOLDERS_NAMED_MAX: usize = 4;

/// What an Event is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    /// UID of a claim that waits, and of one of its pods.
    Claim(String, Option<String>),
    /// UID of a pod, and its name of a claim that is not made.
    Unmade(String, String),
}

/// What is so now.
struct Observed<'a> {
    target: Target,
    reason: Reason,
    regarding: ObjectReference,
    related: Option<ObjectReference>,
    /// The refusal. None: it is no claim's.
    why: Option<&'a Arc<NotAllocated>>,
    note: String,
}

/// One Event, and when it is to be written.
struct Series {
    reason: Reason,
    regarding: ObjectReference,
    related: Option<ObjectReference>,
    /// The last refusal that was seen.
    why: Option<Arc<NotAllocated>>,
    note: String,
    count: i32,
    /// Among what is so now. None: it is not.
    place: Option<usize>,
    due: Instant,
    written: Option<Written>,
}

/// The last write of an Event.
struct Written {
    name: String,
    at: Instant,
    count: i32,
}

/// The Events of the claims that wait, or waited and are still here.
#[derive(Default)]
struct PendingEvents(BTreeMap<Target, Series>);

impl PendingEvents {
    /// `here`: UIDs of all claims.
    fn observe(
        &mut self,
        waiting: &[WaitingClaim],
        unmade: &[UnmadeClaim],
        here: &BTreeSet<String>,
        now: Instant,
    ) {
        for series in self.0.values_mut() {
            series.place = None;
        }
        let of_claims = waiting.iter().flat_map(of_waiting);
        let observed = of_claims.chain(unmade.iter().map(of_unmade));
        for (place, observed) in observed.enumerate() {
            self.observe_one(place, observed, now);
        }
        let seen: BTreeSet<_> = waiting.iter().map(|claim| claim.id.uid.as_str()).collect();
        // A claim is not refused for a moment whenever it is decided again: its Event stays. A pod that is gone takes its Event with it.
        self.0.retain(|target, series| {
            series.place.is_some()
                || matches!(target, Target::Claim(claim, _) if here.contains(claim) && !seen.contains(claim.as_str()))
        });
    }

    fn observe_one(&mut self, place: usize, observed: Observed<'_>, now: Instant) {
        let Observed {
            target,
            reason,
            regarding,
            related,
            why,
            note,
        } = observed;
        let series = self.0.entry(target).or_insert_with(|| Series {
            reason,
            regarding,
            related,
            why: why.cloned(),
            note: note.clone(),
            count: 1,
            place: None,
            due: now + WAIT_MIN,
            written: None,
        });
        series.place = Some(place);
        if !is_same(series.why.as_ref(), why) {
            series.why = why.cloned();
            series.count = series.count.saturating_add(1);
        } else if series.note == note {
            return;
        }
        series.note = note;
        if let Some(written) = &series.written {
            series.due = series.due.min((written.at + UPDATE_EVERY).max(now));
        }
    }

    /// Returns the Event to be written next: of the earliest, that of the claim that waits first.
    fn next(&self) -> Option<(Instant, &Target)> {
        let waiting = self.0.iter().filter(|(_, series)| series.place.is_some());
        let next = waiting.min_by_key(|(_, series)| (series.due, series.place));
        next.map(|(target, series)| (series.due, target))
    }

    /// Returns the Event to be written now.
    fn due(&mut self, now: Instant) -> Option<&mut Series> {
        let (due, target) = self.next()?;
        if due > now {
            return None;
        }
        let target = target.clone();
        self.0.get_mut(&target)
    }
}

fn is_same(one: Option<&Arc<NotAllocated>>, other: Option<&Arc<NotAllocated>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (None, None) => true,
        _ => false,
    }
}

/// The Events of a claim that waits: its own, and those of its pods.
fn of_waiting(claim: &WaitingClaim) -> Vec<Observed<'_>> {
    let object = ObjectReference {
        api_version: Some("resource.k8s.io/v1".to_owned()),
        ..of_claim(&claim.id)
    };
    let of = |pod: Option<&ObjectRef>, note: String| {
        let (regarding, related) = match pod {
            None => (object.clone(), None),
            Some(pod) => (of_pod(pod), Some(object.clone())),
        };
        let pod = pod.map(|pod| pod.uid.to_string());
        Observed {
            target: Target::Claim(claim.id.uid.to_string(), pod),
            reason: NOT_ALLOCATED,
            regarding,
            related,
            why: Some(&claim.why),
            note,
        }
    };
    let note = note(claim);
    let of_pods = format!("claim {}: {note}", claim.id.name);
    let mut observed = vec![of(None, note)];
    observed.extend(claim.pods.iter().map(|pod| of(Some(pod), of_pods.clone())));
    observed
}

/// The Event of a pod's claim that cannot be made.
fn of_unmade(unmade: &UnmadeClaim) -> Observed<'_> {
    let UnmadeClaim {
        pod,
        claim,
        template,
    } = unmade;
    let (namespace, uid) = (&pod.namespace, pod.uid.to_string());
    let note = format!(
        "cannot create the claim {claim}: there is no ResourceClaimTemplate {namespace}/{template}"
    );
    Observed {
        target: Target::Unmade(uid, claim.clone()),
        reason: NOT_MADE,
        regarding: of_pod(pod),
        related: None,
        why: None,
        note,
    }
}

fn of_pod(pod: &ObjectRef) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".to_owned()),
        ..reference("Pod", Some(&pod.namespace), &pod.name, Some(&pod.uid))
    }
}

/// Why the claim waits, and for which claims.
fn note(claim: &WaitingClaim) -> String {
    let named: Vec<_> = claim
        .holders
        .iter()
        .take(HOLDERS_NAMED_MAX)
        .map(String::as_str)
        .collect();
    let more = claim.holders.len() - named.len();
    let named = named.join(", ");
    let holders = match (named.is_empty(), more) {
        (true, _) => String::new(),
        (false, 0) => format!("; it could have devices of {named}"),
        (false, more) => format!("; it could have devices of {named} and {more} more"),
    };
    format!("cannot allocate devices: {}{holders}", claim.why.message)
}

/// Publishes the Events of claims that wait and of claims that are not made, until the claims are not decided any more.
pub(super) async fn publish(claims: LocalClaims, writer: EventWriter) {
    let mut views = claims.0.view.subscribe();
    let mut events = PendingEvents::default();
    let mut tokens = TokenBucket::full(WRITES_PER_SECOND, WRITES_BURST, Instant::now());
    loop {
        let due = events.next().map(|(due, _)| due);
        tokio::select! {
            changed = views.changed() => if changed.is_err() {
                return;
            },
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {}
        }
        sleep(LOOK_EVERY).await;
        let here = views
            .borrow_and_update()
            .claims
            .values()
            .filter_map(|claim| claim.metadata.uid.clone())
            .collect();
        let unmade = claims.0.view.borrow().unmade.clone();
        events.observe(&waiting(&claims), &unmade, &here, Instant::now());
        while let Some(series) = events.due(Instant::now())
            && tokens.take(Instant::now(), 0).is_ok()
        {
            series.write(&writer).await;
        }
    }
}

/// A user reads of other users' claims only that there are some.
fn waiting(claims: &LocalClaims) -> Vec<WaitingClaim> {
    let mut waiting = claims.waiting();
    for claim in &mut waiting {
        let namespace = claim.id.namespace.to_string();
        if super::names::is_user_namespace(&namespace) {
            claim.hide_others(&namespace);
        }
    }
    waiting
}

impl Series {
    /// Writes the Event, and sets when it is written again.
    async fn write(&mut self, writer: &EventWriter) {
        let note = one_line(&self.note, EVENT_MESSAGE_BYTES_MAX);
        let (reason, action) = self.reason;
        let event = warning(reason, action, note, self.related.clone());
        let written = match &self.written {
            None => writer.create(&event, &self.regarding, self.count).await,
            Some(Written { name, count, .. }) => {
                // One of which nothing changed is still so.
                self.count = self.count.max(count.saturating_add(1));
                let replaced = writer.replace(&event, &self.regarding, name, self.count);
                replaced.await.map(|()| name.clone())
            }
        };
        let at = Instant::now();
        match written.map_err(ApiError::from) {
            Ok(name) => {
                let count = self.count;
                self.due = at + REPEAT_EVERY;
                self.written = Some(Written { name, at, count });
            }
            Err(error) => {
                // One that was deleted is made again.
                if error.kind == ErrorKind::NotFound {
                    self.written = None;
                }
                tracing::debug!(%error, "an event of a claim that waits is not written, retrying");
                self.due = at + RETRY_EVERY;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use nodedock_allocator::allocate::NotAllocatedKind;
    use nodedock_stand_ins::api_server::ApiServer;
    use serde_json::Value;

    use super::*;
    use crate::client::tests::over;
    use nodedock_model::ObjectName;
    use nodedock_model::limit::SUBDOMAIN_BYTES_MAX;

    fn refusal(message: &str) -> Arc<NotAllocated> {
        Arc::new(NotAllocated {
            kind: NotAllocatedKind::Unsatisfiable,
            message: message.to_owned(),
            devices: Vec::new(),
            more: false,
        })
    }

    fn waits(name: &str, why: &Arc<NotAllocated>, pods: &[&str]) -> WaitingClaim {
        let of = |name: &str| ObjectRef::new("default", name, name).unwrap();
        WaitingClaim {
            pods: pods.iter().map(|name| of(name)).collect(),
            ..WaitingClaim::new(of(name), why.clone(), BTreeMap::new())
        }
    }

    fn here(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn short_wait_has_no_event() {
        let (now, why) = (Instant::now(), refusal("none left"));
        let mut events = PendingEvents::default();
        events.observe(&[waits("a", &why, &[])], &[], &here(&["a"]), now);
        assert!(events.due(now).is_none());
        events.observe(&[], &[], &here(&["a"]), now + WAIT_MIN);
        assert!(events.next().is_none());
        // It is decided again, and its wait began before.
        events.observe(&[waits("a", &why, &[])], &[], &here(&["a"]), now + WAIT_MIN);
        assert!(events.due(now + WAIT_MIN).is_some());
        events.observe(&[], &[], &here(&[]), now + WAIT_MIN);
        assert!(events.0.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn events_follow_claims_and_pods() {
        let (now, why) = (Instant::now(), refusal("none left"));
        let mut events = PendingEvents::default();
        let claims = [waits("b", &why, &["pod"]), waits("a", &why, &[])];
        events.observe(&claims, &[], &here(&["a", "b"]), now);
        let first = events.due(now + WAIT_MIN).unwrap();
        assert_eq!(first.regarding.name.as_deref(), Some("b"));
        assert_eq!(events.0.len(), 3);
        let notes: Vec<_> = events
            .0
            .values()
            .map(|series| series.note.as_str())
            .collect();
        let expected = [
            "cannot allocate devices: none left",
            "cannot allocate devices: none left",
            "claim b: cannot allocate devices: none left",
        ];
        assert_eq!(notes, expected);
        let without_pod = [waits("b", &why, &[]), waits("a", &why, &[])];
        events.observe(&without_pod, &[], &here(&["a", "b"]), now);
        assert_eq!(events.0.len(), 2);
    }

    /// A pod whose template was misspelt waited without a word of it.
    #[tokio::test(start_paused = true)]
    async fn missing_template_has_pod_event() {
        let server = Arc::new(ApiServer::start().await);
        let mut events = PendingEvents::default();
        let unmade = UnmadeClaim {
            pod: ObjectRef::new("default", "web", "uid-web").unwrap(),
            claim: "gpu".to_owned(),
            template: "gpus".to_owned(),
        };
        events.observe(
            &[],
            std::slice::from_ref(&unmade),
            &here(&[]),
            Instant::now(),
        );
        assert!(events.due(Instant::now()).is_none(), "it may come at once");
        tokio::time::advance(WAIT_MIN).await;
        let found = written(&mut events, &server).await;
        let [event] = &found[..] else {
            panic!("{found:#?}")
        };
        assert_eq!(event["reason"], "FailedResourceClaimCreation");
        assert_eq!(event["involvedObject"]["kind"], "Pod");
        assert_eq!(event["involvedObject"]["uid"], "uid-web");
        assert_eq!(
            event["message"],
            "cannot create the claim gpu: there is no ResourceClaimTemplate default/gpus"
        );
        // It is the same for as long as it lasts, and ends with the template or the pod.
        events.observe(&[], &[unmade], &here(&[]), Instant::now());
        assert_eq!(written(&mut events, &server).await.len(), 1);
        events.observe(&[], &[], &here(&[]), Instant::now());
        assert!(events.0.is_empty());
    }

    #[test]
    fn note_names_a_few_holders() {
        let mut claim = waits("a", &refusal("none left"), &[]);
        claim.holders = vec!["ns/x".to_owned()];
        assert_eq!(
            note(&claim),
            "cannot allocate devices: none left; it could have devices of ns/x"
        );
        claim.holders = (0..6).map(|index| format!("ns/{index}")).collect();
        assert!(
            note(&claim).ends_with("devices of ns/0, ns/1, ns/2, ns/3 and 2 more"),
            "{}",
            note(&claim)
        );
    }

    /// Writes what is due, and returns the objects.
    async fn written(events: &mut PendingEvents, server: &Arc<ApiServer>) -> Vec<Value> {
        let node = ObjectName::new("n".repeat(SUBDOMAIN_BYTES_MAX)).unwrap();
        let writer = EventWriter::new(over(server).client(), &node);
        while let Some(series) = events.due(Instant::now()) {
            series.write(&writer).await;
        }
        server.list("events")
    }

    #[tokio::test(start_paused = true)]
    async fn event_has_newest_reason_and_count() {
        let server = Arc::new(ApiServer::start().await);
        let mut events = PendingEvents::default();
        let observe = |events: &mut PendingEvents, why: &Arc<NotAllocated>| {
            events.observe(
                &[waits("a", why, &["pod"])],
                &[],
                &here(&["a"]),
                Instant::now(),
            );
        };
        observe(&mut events, &refusal("none left"));
        tokio::time::advance(WAIT_MIN).await;
        let found = written(&mut events, &server).await;
        assert_eq!(found.len(), 2, "{found:#?}");
        for event in &found {
            assert_eq!(
                (&event["reason"], &event["type"], &event["action"]),
                (
                    &"FailedScheduling".into(),
                    &"Warning".into(),
                    &"Scheduling".into()
                )
            );
        }
        // Several changes are one write, after a time.
        observe(&mut events, &refusal("1 short"));
        observe(&mut events, &refusal("2 short"));
        assert!(events.due(Instant::now()).is_none());
        tokio::time::advance(2 * UPDATE_EVERY).await;
        let found = written(&mut events, &server).await;
        let of_claim = found
            .iter()
            .find(|event| event["involvedObject"]["kind"] == "ResourceClaim")
            .unwrap();
        assert_eq!(of_claim["involvedObject"]["uid"], "a");
        assert_eq!(of_claim["message"], "cannot allocate devices: 2 short");
        assert_eq!(of_claim["series"]["count"], 3);
        assert_eq!(found.len(), 2, "{found:#?}");
        // Without a change it is written again before the API deletes it.
        tokio::time::advance(2 * REPEAT_EVERY).await;
        let found = written(&mut events, &server).await;
        assert!(
            found.iter().all(|event| event["series"]["count"] == 4),
            "{found:#?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn long_claim_name_fits_its_event() {
        let server = Arc::new(ApiServer::start().await);
        let mut events = PendingEvents::default();
        let name = "a".repeat(SUBDOMAIN_BYTES_MAX);
        let mut claim = waits("a", &refusal(&"long ".repeat(1000)), &[]);
        claim.id = ObjectRef::new("default", &name, "a").unwrap();
        events.observe(&[claim], &[], &here(&["a"]), Instant::now());
        tokio::time::advance(WAIT_MIN).await;
        let found = written(&mut events, &server).await;
        let [event] = &found[..] else {
            panic!("{found:#?}")
        };
        assert!(event["message"].as_str().unwrap().len() <= EVENT_MESSAGE_BYTES_MAX);
        assert!(event["metadata"]["name"].as_str().unwrap().len() <= SUBDOMAIN_BYTES_MAX);
    }
}
