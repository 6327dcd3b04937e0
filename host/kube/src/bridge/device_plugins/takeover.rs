//! Devices that pods of the kubelet have by a device plugin's own IDs, from the time before the plugin became a driver.
//!
//! The plugin is no longer offered to the kubelet when this begins, so the number of such devices only decreases. They are read from the
//! kubelet's list of the devices that pods use, once before the driver has any device, and then until two lists, a minute apart, do not
//! have them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::watch;
use tokio::time::Instant;

use super::IN_USE_DEADLINE;
use super::in_use::{self, IN_USE_UNKNOWN};
use crate::bridge::Context;
use crate::bridge::convert::PodDevices;
use crate::bridge::plugin_claim::Ids;
use nodedock_base::device_plugin_sockets::{KUBELET_SOCKET, SocketId, Sockets};
use nodedock_core::adapters::Adapters;
use nodedock_model::{ExtendedResource, Problem, ProblemCode};

/// Time from the start to the first list: an Allocate that was answered just before is in the kubelet's list by then.
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
            (seen, failing_since) = Default::default();
            if changes.changed().await.is_err() {
                return;
            }
            continue;
        }
        match round(&context, &adapters, &sockets, &mut seen).await {
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

async fn round(
    context: &Context,
    adapters: &Adapters,
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
    for (resource, known) in adapters.awaited() {
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
