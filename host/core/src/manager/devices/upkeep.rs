//! Tasks that need no request: follow drivers' pools, end grace periods, report changes.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::Devices;
use crate::checkpoint::{Change, Checkpoint};
use crate::driver::Published;
use crate::resources::{Contender, pools};
use nodedock_base::clock::now_ms;
use nodedock_model::{
    ChangedKind, DriverName, ExtendedResource, NameRecord, Named, Problem, ProblemCode, limit,
};

/// Interval between two reports of changed resources: health may flap a thousand times per second.
const DEVICE_CHANGES_PERIOD: Duration = Duration::from_secs(1);

/// Interval between two tries to store the sources of resources.
const OWNERS_RETRY: Duration = Duration::from_secs(5);

type Followed = Vec<(DriverName, watch::Receiver<Arc<Published>>)>;

impl Devices {
    /// Reports a change of resources, or of what pods have of them.
    pub(in crate::manager) fn report_resources(
        &self,
        resources: impl IntoIterator<Item = ExtendedResource>,
    ) {
        let contenders = {
            let mut state = self.state.lock();
            state.unreported.extend(resources);
            state.resources.contenders()
        };
        self.set_contender_conditions(&contenders);
        self.changed.send();
        self.changes_unreported.notify_one();
    }

    /// Keeps the sources of resources in the checkpoint, so that they have their names after a restart.
    pub(crate) async fn keep_owners(self: Arc<Self>, checkpoint: Checkpoint) {
        let mut changes = self.changes();
        loop {
            changes.mark_unchanged();
            let retry = self.store_owners(&checkpoint).await.err().map(|problem| {
                // The checkpoint reports that it takes no writes.
                tracing::debug!(%problem, "the sources of extended resources are not stored yet");
                Instant::now() + OWNERS_RETRY
            });
            tokio::select! {
                // What is not stored is found again after the next start.
                () = self.tasks.stopped() => return,
                changed = changes.changed(), if retry.is_none() => if changed.is_err() { return },
                () = sleep_until(retry.unwrap_or_else(Instant::now)), if retry.is_some() => {}
            }
        }
    }

    async fn store_owners(&self, checkpoint: &Checkpoint) -> Result<(), Problem> {
        let new = self.state.lock().resources.new_owners();
        let changes = new.iter().map(|(name, owner)| match owner {
            Some(owner) => Change::PutName(Arc::new(NameRecord::new(
                Named::Resource(name.clone()),
                owner.clone(),
                now_ms(),
                None,
            ))),
            None => Change::DeleteName(NameRecord::key(&Named::Resource(name.clone()))),
        });
        let changes = changes.collect();
        if new.is_empty() {
            return Ok(());
        }

        checkpoint
            .commit(changes)
            .await
            .map_err(|error| error.problem())?;
        self.state.lock().resources.set_owners(new);
        Ok(())
    }

    fn set_contender_conditions(&self, contenders: &[Contender]) {
        for contender in contenders {
            let Contender {
                resource,
                waits,
                keeps,
            } = contender;
            let message =
                format!("{waits} offers {resource}, which {keeps} had first: it is not used");
            self.conditions.set(
                &subject(contender),
                Problem::conflict(ProblemCode::ResourceTaken, message),
            );
        }
        let subjects: Vec<_> = contenders.iter().map(subject).collect();
        self.conditions.retain(ProblemCode::ResourceTaken, |known| {
            subjects.iter().any(|subject| subject == known)
        });
    }

    /// Sends changes to the subscribers of `changes`, each resource at most once per period.
    pub(crate) async fn report_changes(self: Arc<Self>) {
        loop {
            tokio::select! {
                // At a stop no subscriber is left.
                () = self.tasks.stopped() => return,
                () = self.changes_unreported.notified() => {}
            }
            let unreported = std::mem::take(&mut self.state.lock().unreported);
            for resource in unreported {
                self.changes
                    .report(ChangedKind::Device, resource, "changed");
            }
            tokio::select! {
                () = self.tasks.stopped() => return,
                // Changes meanwhile wait in `unreported`.
                () = tokio::time::sleep(DEVICE_CHANGES_PERIOD) => {}
            }
        }
    }

    pub(crate) async fn end_grace(self: Arc<Self>) {
        loop {
            let next = self.state.lock().resources.next_expiry(self.settings.grace);
            tokio::select! {
                // Nothing is lost: after a restart the grace period begins again.
                () = self.tasks.stopped() => return,
                // The next round checks all sources.
                () = self.source_gone.notified() => {}
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    self.expire(self.settings.grace);
                }
            }
        }
    }

    fn expire(&self, grace: Duration) {
        let gone = self.state.lock().resources.expire(Instant::now(), grace);
        for resource in &gone {
            tracing::warn!(%resource, "a source of the resource did not come back");
            self.conditions
                .clear(ProblemCode::DeviceListFaulty, resource.as_str());
            self.conditions
                .clear(ProblemCode::PreferenceFailed, resource.as_str());
        }
        if !gone.is_empty() {
            self.report_resources(gone);
        }
    }

    /// Keeps resources in step with the pools of drivers that serve.
    pub(crate) async fn follow_pools(self: Arc<Self>) {
        let (mut serving, mut freed) = (
            self.registry.instances.changes(),
            self.registry.names.changes(),
        );
        loop {
            serving.mark_unchanged();
            freed.mark_unchanged();
            let mut followed = self.drivers_with_pools();
            self.take_pools(&mut followed);
            // Bounds the work for a driver whose health flaps.
            tokio::select! {
                () = self.tasks.stopped() => return,
                () = tokio::time::sleep(limit::EVENT_DEBOUNCE) => {}
            }
            tokio::select! {
                // Pools are read again after a restart.
                () = self.tasks.stopped() => return,
                // The next round reads everything, whichever it was.
                changed = serving.changed() => if changed.is_err() { return },
                changed = freed.changed() => if changed.is_err() { return },
                () = inventory_changed(&mut followed) => {}
            }
        }
    }

    fn drivers_with_pools(&self) -> Followed {
        let drivers = self.registry.instances.all().into_iter();
        drivers
            .filter_map(|driver| Some((driver.identity.name.clone(), driver.inventory?)))
            .collect()
    }

    fn take_pools(&self, followed: &mut Followed) {
        let now: Vec<_> = followed
            .iter_mut()
            .map(|(name, seen)| (name.clone(), seen.borrow_and_update().clone()))
            .collect();
        let offers = pools::offers(&now);
        let changed = self
            .state
            .lock()
            .resources
            .set_pools(offers, Instant::now());
        if !changed.is_empty() {
            self.source_gone.notify_one();
            self.report_resources(changed);
        }
    }
}

fn subject(contender: &Contender) -> String {
    format!("{} of {}", contender.resource, contender.waits)
}

/// Waits until a driver has another inventory than the one that was read. The end of an inventory is reported by the registry.
async fn inventory_changed(followed: &mut Followed) {
    let changes = followed.iter_mut().map(|(_, seen)| async {
        if seen.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    });
    if changes
        .collect::<FuturesUnordered<_>>()
        .next()
        .await
        .is_none()
    {
        std::future::pending().await
    }
}
