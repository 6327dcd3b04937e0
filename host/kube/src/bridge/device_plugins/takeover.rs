//! Which devices pods of the kubelet have by a device plugin's own IDs, from the time before the plugin became a driver.
//!
//! The plugin is not offered to the kubelet any more when this begins, so such devices become only fewer. They are read from the kubelet's
//! list of the devices that pods use, once before the driver has any device, and then until they are free.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::IN_USE_DEADLINE;
use super::in_use::{self, IN_USE_UNKNOWN, PodDevices};
use crate::bridge::Context;
use nodedock_base::device_plugin_sockets::{KUBELET_SOCKET, SocketId, Sockets};
use nodedock_core::adapters::Adapters;
use nodedock_model::{Problem, ProblemCode};

/// From the start to the first list: an Allocate that was answered just before is in the kubelet's list by then.
const SETTLE: Duration = Duration::from_secs(5);
/// Between two lists: an operator waits for the first.
const LIST_PERIOD: Duration = Duration::from_secs(5);
/// Of the condition.
const SUBJECT: &str = "adapters";

/// Since when a kubelet lists no pod at all.
#[derive(Debug, Default, PartialEq, Eq)]
struct Empty {
    kubelet: Option<SocketId>,
    since: Option<Instant>,
}

impl Empty {
    /// Takes a list. Returns whether a kubelet has had no pods for so long that it has none; one that has just started does not know them.
    fn holds(&mut self, kubelet: Option<SocketId>, is_empty: bool, now: Instant, wait: Duration) -> bool {
        if !is_empty || self.kubelet != kubelet {
            *self = Self { kubelet, since: None };
        }
        is_empty && kubelet.is_some() && now >= *self.since.get_or_insert(now) + wait
    }
}

/// Runs until it is dropped.
pub(super) async fn run(context: Arc<Context>, sockets: watch::Receiver<Arc<Sockets>>) {
    let Some(adapters) = context.parts.manager.adapters().cloned() else { return };
    let mut changes = adapters.changes();
    let mut empty = Empty::default();
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
            context.parts.conditions.clear(ProblemCode::PodResourcesAway, SUBJECT);
            (empty, failing_since) = Default::default();
            if changes.changed().await.is_err() {
                return;
            }
            continue;
        }
        let before = kubelet(&sockets);
        let listed = in_use::any_list(&context, IN_USE_DEADLINE).await;
        let is_same = before == kubelet(&sockets);
        let taken = match listed {
            Ok(listed) if is_same && is_complete(&context, &listed, &mut empty, before) => {
                take(&adapters, &listed).await
            }
            Ok(listed) => Err(in_use::missing(&context, &listed).unwrap_or("no pod for long").to_owned()),
            Err(why) => Err(why),
        };
        match taken {
            Ok(()) => {
                failing_since = None;
                context.parts.conditions.clear(ProblemCode::PodResourcesAway, SUBJECT);
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

fn kubelet(sockets: &watch::Receiver<Arc<Sockets>>) -> Option<SocketId> {
    sockets.borrow().get(KUBELET_SOCKET).copied()
}

fn is_complete(context: &Context, listed: &PodDevices, empty: &mut Empty, kubelet: Option<SocketId>) -> bool {
    let is_empty = listed.pods.is_empty() && context.parts.own_pod.is_none();
    empty.holds(kubelet, is_empty, Instant::now(), context.parts.times.unused)
        || in_use::missing(context, listed).is_none()
}

async fn take(adapters: &Adapters, listed: &PodDevices) -> Result<(), String> {
    for resource in adapters.awaited() {
        let ids = listed.in_use.get(&resource).cloned().unwrap_or_default();
        let taken = adapters.set_held(&resource, &ids).await;
        taken.map_err(|problem| problem.message)?;
        if !ids.is_empty() {
            tracing::debug!(%resource, count = ids.len(), "pods have devices from the time before the adapter");
        }
    }
    Ok(())
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
    fn a_kubelet_has_no_pods_when_it_has_said_so_for_long() {
        let (start, wait) = (Instant::now(), Duration::from_secs(60));
        let ids = [1, 2].map(|inode| SocketId { device: 1, inode, made: std::time::SystemTime::UNIX_EPOCH });
        let mut empty = Empty::default();
        let at = |second| start + Duration::from_secs(second);
        assert!(!empty.holds(Some(ids[0]), true, at(0), wait));
        assert!(!empty.holds(Some(ids[0]), true, at(59), wait));
        assert!(empty.holds(Some(ids[0]), true, at(60), wait));
        assert!(!empty.holds(Some(ids[0]), false, at(61), wait), "it has pods");
        assert!(!empty.holds(Some(ids[0]), true, at(62), wait));
        assert!(!empty.holds(Some(ids[1]), true, at(200), wait), "it is another kubelet");
        assert!(!empty.holds(None, true, at(300), wait));
    }
}
