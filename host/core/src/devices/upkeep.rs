//! What goes on without requests: lists are taken in, drivers' pools followed, grace periods ended, changes told.

use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, select_all};
use tokio::sync::watch;
use tokio::time::Instant;

use super::resources::{Contender, Listed};
use super::{Inner, PluginId, list, pools};
use crate::driver::Published;
use nodedock_model::{ChangedKind, DriverName, ExtendedResource, PluginDevice, Problem, limit};

/// The code of the condition of a source that waits for a resource's name.
const TAKEN: &str = "resource-taken";

type Followed = Vec<(DriverName, watch::Receiver<Arc<Published>>)>;

impl Inner {
    pub(super) fn plugin_listed(&self, id: &PluginId, devices: &[PluginDevice]) {
        let (devices, faults) = list::screen(devices);
        let mut state = self.state();
        if !state.resources.is_current(id) {
            return;
        }
        let changed = state.resources.list(id, Listed::new(devices));
        drop(state);
        let subject = id.resource().as_str();
        match faults.problem(id.resource()) {
            Some(problem) => self.conditions.set(subject, problem),
            None => self.conditions.clear(list::FAULTY_LIST, subject),
        }
        if changed {
            self.changed([id.resource().clone()]);
        }
    }

    /// Resources, or what pods have of them, are different now.
    pub(super) fn changed(&self, resources: impl IntoIterator<Item = ExtendedResource>) {
        let mut state = self.state();
        state.untold.extend(resources);
        let contenders = state.resources.contenders();
        drop(state);
        self.say_contenders(&contenders);
        self.followed.send_modify(|count| *count += 1);
        self.changed.notify_one();
    }

    fn say_contenders(&self, contenders: &[Contender]) {
        let subject = |contender: &Contender| format!("{} of {}", contender.resource, contender.waits);
        for contender in contenders {
            let Contender { resource, waits, keeps } = contender;
            let message = format!("{waits} offers {resource}, which {keeps} had first: it is not used");
            self.conditions.set(&subject(contender), Problem::conflict(TAKEN, message));
        }
        let subjects: Vec<_> = contenders.iter().map(subject).collect();
        self.conditions.retain(TAKEN, |known| subjects.iter().any(|subject| subject == known));
    }

    /// Tells changes to whoever listens, each resource once a period at most.
    pub(super) async fn tell_changes(&self) {
        loop {
            tokio::select! {
                // Nobody listens any more.
                () = self.tasks.stopped() => return,
                () = self.changed.notified() => {}
            }
            let untold = std::mem::take(&mut self.state().untold);
            for resource in untold {
                self.changes.tell(ChangedKind::Device, resource, "changed");
            }
            tokio::select! {
                () = self.tasks.stopped() => return,
                // What changes meanwhile waits in `untold`.
                () = tokio::time::sleep(limit::DEVICE_CHANGES_PERIOD) => {}
            }
        }
    }

    /// Takes out sources that have been gone for too long.
    pub(super) async fn end_grace(&self) {
        loop {
            let next = self.state().resources.next_expiry(self.settings.grace);
            let expiry = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // Nothing is lost: after a restart grace runs anew.
                () = self.tasks.stopped() => return,
                // The next turn looks at all of them.
                () = self.left.notified() => {}
                () = expiry => self.expire(self.settings.grace),
            }
        }
    }

    fn expire(&self, grace: Duration) {
        let gone = self.state().resources.expire(Instant::now(), grace);
        for resource in &gone {
            tracing::warn!(%resource, "a source of the resource did not come back");
            self.conditions.clear(list::FAULTY_LIST, resource.as_str());
        }
        if !gone.is_empty() {
            self.changed(gone);
        }
    }

    /// Keeps resources in step with the pools of drivers that serve.
    pub(super) async fn follow_pools(&self) {
        let (mut serving, mut freed) = (self.registry.serving_changes(), self.registry.freed_changes());
        loop {
            serving.mark_unchanged();
            freed.mark_unchanged();
            let mut followed = self.drivers_with_pools();
            self.take_pools(&mut followed);
            // A driver whose health flaps costs a look in each such time.
            tokio::select! {
                () = self.tasks.stopped() => return,
                () = tokio::time::sleep(limit::EVENT_DEBOUNCE) => {}
            }
            let inventory = inventory_changed(&mut followed);
            tokio::select! {
                // Pools are looked at anew after a restart.
                () = self.tasks.stopped() => return,
                // Whichever it was, the next turn looks at everything.
                changed = serving.changed() => if changed.is_err() { return },
                changed = freed.changed() => if changed.is_err() { return },
                () = inventory => {}
            }
        }
    }

    fn drivers_with_pools(&self) -> Followed {
        let drivers = self.registry.all_serving().into_iter();
        drivers.filter_map(|driver| Some((driver.identity.name.clone(), driver.inventory?))).collect()
    }

    fn take_pools(&self, followed: &mut Followed) {
        let now: Vec<_> = followed
            .iter_mut()
            .map(|(name, seen)| (name.clone(), seen.borrow_and_update().clone()))
            .collect();
        let offers = pools::offers(&now);
        let changed = self.state().resources.set_pools(offers, Instant::now());
        if !changed.is_empty() {
            self.left.notify_one();
            self.changed(changed);
        }
    }
}

/// Ends when a driver has another inventory than the one that was seen. One that ended says nothing more; that its driver is gone
/// the registry tells.
fn inventory_changed(followed: &mut Followed) -> BoxFuture<'_, ()> {
    let one = |seen: &mut watch::Receiver<Arc<Published>>| {
        let mut seen = seen.clone();
        async move {
            if seen.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
        .boxed()
    };
    let all: Vec<_> = followed.iter_mut().map(|(_, seen)| one(seen)).collect();
    if all.is_empty() {
        return std::future::pending().boxed();
    }
    select_all(all).map(drop).boxed()
}
