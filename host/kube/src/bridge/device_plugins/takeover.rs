//! Devices that pods of the kubelet have by a device plugin's own IDs, from the time before the plugin became a driver.
//!
//! The plugin is no longer offered to the kubelet when this begins, so the number of such devices only decreases. They are read from the
//! kubelet's list of the devices that pods use, once before the driver has any device, and then until two lists, a minute apart, do not
//! have them. The first list of a resource comes some seconds after the start, or after the last call for a device of an adapter that was written later.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

use super::in_use::{self, IN_USE_UNKNOWN};
use super::{IN_USE_DEADLINE, OfferedResource};
use crate::bridge::Context;
use crate::bridge::convert::PodDevices;
use crate::bridge::plugin_claim::Ids;
use nodedock_base::device_plugin_sockets::{KUBELET_SOCKET, SocketId, Sockets};
use nodedock_model::{ExtendedResource, Problem, ProblemCode};

/// Time from the start, or from the withdrawal of a plugin, to the first list: an Allocate that was answered just before is in the kubelet's list by then.
const SETTLE: Duration = Duration::from_secs(5);
/// Interval between two lists: an operator waits for the first.
const LIST_PERIOD: Duration = Duration::from_secs(5);
/// Number of lists without a device before it is free, regardless of the time that has passed.
const ABSENT_LISTS: u32 = 2;
/// Subject of the condition.
const SUBJECT: &str = "adapters";

/// The lists of one kubelet so far.
#[derive(Debug, Default)]
struct KubeletLists {
    kubelet: Option<SocketId>,
    /// Time since which a device is in no list, and number of lists without it.
    absent: BTreeMap<(ExtendedResource, String), (Instant, u32)>,
}

/// Times since which resources are not offered by their plugins' own IDs.
#[derive(Debug, Default)]
struct Withdrawn(BTreeMap<ExtendedResource, Instant>);

impl Withdrawn {
    /// Returns those of the awaited resources of which a list has all devices that the kubelet allocated.
    fn due(
        &mut self,
        awaited: &BTreeMap<ExtendedResource, Ids>,
        now: Instant,
        is_withdrawn: impl Fn(&ExtendedResource) -> bool,
    ) -> BTreeSet<ExtendedResource> {
        self.0.retain(|resource, _| awaited.contains_key(resource));
        let mut due = BTreeSet::new();
        for resource in awaited.keys() {
            if !is_withdrawn(resource) {
                self.0.remove(resource);
                continue;
            }
            let since = *self.0.entry(resource.clone()).or_insert(now);
            due.extend((now >= since + SETTLE).then(|| resource.clone()));
        }
        due
    }
}

impl KubeletLists {
    /// Takes a list of what pods have of a resource. Returns the devices that they may have, of which `known` were known.
    fn held(
        &mut self,
        resource: &ExtendedResource,
        (known, listed): (&Ids, &Ids),
        now: Instant,
        wait: Duration,
    ) -> Ids {
        let mut held = listed.clone();
        for id in listed {
            self.absent.remove(&(resource.clone(), id.clone()));
        }
        for id in known.difference(listed) {
            let (since, lists) = self
                .absent
                .entry((resource.clone(), id.clone()))
                .or_insert((now, 0));
            *lists += 1;
            if *lists < ABSENT_LISTS || now < *since + wait {
                held.insert(id.clone());
            }
        }
        held
    }
}

/// Runs until it is dropped.
pub(super) async fn run(context: Arc<Context>, sockets: watch::Receiver<Arc<Sockets>>) {
    let Some(adapters) = context.parts.manager.adapters.clone() else {
        return;
    };
    let mut changes = adapters.changes();
    let mut seen = KubeletLists::default();
    // What is awaited at the start was withdrawn before.
    let mut withdrawn = Withdrawn(
        adapters
            .awaited()
            .into_keys()
            .map(|resource| (resource, Instant::now()))
            .collect(),
    );
    let mut failing_since: Option<Instant> = None;
    // The instance before answers the kubelet until then.
    let mut alone = context.alone.subscribe();
    if alone.wait_for(|is_alone| *is_alone).await.is_err() {
        return;
    }
    tokio::time::sleep(SETTLE).await;
    loop {
        changes.mark_unchanged();
        if adapters.awaited().is_empty() {
            context
                .parts
                .conditions
                .clear(ProblemCode::PodResourcesAway, SUBJECT);
            (seen, failing_since, withdrawn) = Default::default();
            if changes.changed().await.is_err() {
                return;
            }
            continue;
        }
        let due = withdrawn.due(&adapters.awaited(), Instant::now(), |resource| {
            is_withdrawn(&context, resource)
        });
        if due.is_empty() {
            tokio::time::sleep(LIST_PERIOD.min(context.parts.times.in_use_period)).await;
            continue;
        }
        match round(&context, &due, &sockets, &mut seen).await {
            Ok(()) => {
                failing_since = None;
                context
                    .parts
                    .conditions
                    .clear(ProblemCode::PodResourcesAway, SUBJECT);
            }
            Err(why) => {
                let since = *failing_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= IN_USE_UNKNOWN {
                    context.parts.conditions.set(SUBJECT, unknown(&why));
                }
            }
        }
        tokio::time::sleep(LIST_PERIOD.min(context.parts.times.in_use_period)).await;
    }
}

/// Returns whether the kubelet is offered no device by the plugin's own IDs any more, and no call for such a device is under way.
fn is_withdrawn(context: &Context, resource: &ExtendedResource) -> bool {
    let is_plugin = |offered: &OfferedResource| offered.offer.borrow().source.driver().is_none();
    let is_offered = {
        let resources = context.resources.lock();
        resources.get(resource).is_some_and(|of| is_plugin(of))
    };
    let has_calls = |(name, withdrawn): &(ExtendedResource, Weak<OfferedResource>)| {
        name == resource && withdrawn.strong_count() > 0
    };
    !is_offered && !context.withdrawn.lock().iter().any(has_calls)
}

async fn round(
    context: &Context,
    due: &BTreeSet<ExtendedResource>,
    sockets: &watch::Receiver<Arc<Sockets>>,
    seen: &mut KubeletLists,
) -> Result<(), String> {
    let current = || sockets.borrow().get(KUBELET_SOCKET).copied();
    let kubelet = current();
    let listed = in_use::any_list(context, IN_USE_DEADLINE).await?;
    if kubelet != current() {
        return Err("the kubelet restarts".to_owned());
    }
    complete(context, &listed, kubelet)?;
    if seen.kubelet != kubelet {
        *seen = KubeletLists {
            kubelet,
            ..KubeletLists::default()
        };
    }
    let wait = context.parts.times.unused;
    let Some(adapters) = &context.parts.manager.adapters else {
        return Ok(());
    };
    let awaited = adapters.awaited().into_iter();
    for (resource, known) in awaited.filter(|(resource, _)| due.contains(resource)) {
        let ids = listed.in_use.get(&resource).cloned().unwrap_or_default();
        let held = seen.held(&resource, (&known, &ids), Instant::now(), wait);
        let taken = adapters.set_held(&resource, &held).await;
        taken.map_err(|problem| problem.message)?;
    }
    Ok(())
}

/// Checks that a list has all pods: with that of this daemon, or else of a kubelet that has run for a while. One that has just started
/// lists those pods that it knows so far.
fn complete(
    context: &Context,
    listed: &PodDevices,
    kubelet: Option<SocketId>,
) -> Result<(), String> {
    if context.parts.own_pod.is_some() {
        let named = in_use::missing(context, listed);
        return named.map_or(Ok(()), |named| Err(format!("the kubelet names {named}")));
    }
    let age = kubelet.and_then(|kubelet| SystemTime::now().duration_since(kubelet.made).ok());
    match age {
        Some(age) if age >= context.parts.times.unused => Ok(()),
        Some(_) => Err("the kubelet has just started".to_owned()),
        None => Err("there is no kubelet".to_owned()),
    }
}

fn unknown(why: &str) -> Problem {
    let message = format!(
        "the kubelet does not list which devices pods have from the time before an adapter ({why}): devices of adapters stay with pods that are gone, or are not offered yet"
    );
    Problem::unavailable(ProblemCode::PodResourcesAway, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kubelet lists what it allocated just before the plugin was withdrawn some seconds later.
    #[test]
    fn first_list_waits_for_withdrawal() {
        let start = Instant::now();
        let of = |name: &str| ExtendedResource::new(format!("example.com/{name}")).unwrap();
        let awaited = BTreeMap::from(["old", "new"].map(|name| (of(name), Ids::new())));
        let mut withdrawn = Withdrawn(BTreeMap::from([(of("old"), start)]));
        let mut due = |seconds, offered: &str| {
            let now = start + Duration::from_secs(seconds);
            let due = withdrawn.due(&awaited, now, |resource| *resource != of(offered));
            Vec::from_iter(due)
        };
        assert_eq!(due(0, "new"), Vec::new());
        assert_eq!(due(5, "new"), [of("old")]);
        assert_eq!(due(60, "new"), [of("old")], "it is offered still");
        assert_eq!(due(70, "none"), [of("old")]);
        assert_eq!(due(72, "new"), [of("old")], "it was offered again");
        assert_eq!(due(80, "none"), [of("old")]);
        assert_eq!(due(85, "none"), [of("new"), of("old")]);
    }

    #[test]
    fn device_is_free_after_two_lists() {
        let (start, wait) = (Instant::now(), Duration::from_secs(60));
        let at = |second| start + Duration::from_secs(second);
        let resource = ExtendedResource::new("example.com/gpu").unwrap();
        let ids = |ids: &str| -> Ids { ids.chars().map(String::from).collect() };
        let mut seen = KubeletLists::default();
        let mut held = |known: &str, listed: &str, second| {
            let held = seen.held(&resource, (&ids(known), &ids(listed)), at(second), wait);
            held.into_iter().collect::<String>()
        };
        assert_eq!(held("", "ab", 0), "ab");
        assert_eq!(held("ab", "a", 5), "ab");
        assert_eq!(held("ab", "a", 64), "ab");
        assert_eq!(held("ab", "ab", 64), "ab", "it is there again");
        assert_eq!(held("ab", "a", 70), "ab");
        assert_eq!(held("ab", "a", 130), "a");
        assert_eq!(held("a", "", 1000), "a", "one list is not enough");
        assert_eq!(held("a", "", 1060), "");
    }
}
