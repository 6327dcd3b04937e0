//! Keeps the offered resources in step with what drivers have: a keeper for each, their lists, and the memory of them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use futures::FutureExt;
use futures::future::{BoxFuture, select_all};
use tokio::sync::{broadcast, watch};
use tokio::time::Instant;

use super::face::{Current, Face};
use super::keeper::{Keeper, Registration};
use super::offer::{self, Offers, PoolOffer};
use super::{Inner, PluginStatus, claim, memory, socket};
use nodedock_base::device_plugin_sockets::Sockets;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::{Changed, ChangedKind, DriverName, ExtendedResource, Problem, limit};

/// The code of the condition of resources that are too many.
const TOO_MANY: &str = "too-many-resources";
/// The code of the condition that the offered devices cannot be kept.
pub(super) const NOT_KEPT: &str = "bridge-memory";

/// A resource that is offered.
pub(super) struct Resource {
    current: Arc<Current>,
    registration: Arc<Mutex<Registration>>,
    /// Stopped when it is offered no more.
    tasks: Tasks,
}

impl Resource {
    pub(super) fn status(&self, name: &ExtendedResource) -> PluginStatus {
        let offer = self.current.borrow().clone();
        PluginStatus {
            resource: name.clone(),
            driver: offer.driver.clone(),
            devices: offer.devices.len(),
            healthy: offer.devices.iter().filter(|device| device.healthy).count(),
            registration: self.registration.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}

pub(super) struct Offering {
    inner: Arc<Inner>,
    seen: watch::Receiver<Arc<Sockets>>,
    remembered: Offers,
    /// Until when what is remembered is offered.
    grace: Instant,
    kept: Kept,
}

/// What the file has, and when it is written next.
struct Kept {
    written: Option<Offers>,
    next: Instant,
}

impl Offering {
    pub(super) fn new(inner: Arc<Inner>, seen: watch::Receiver<Arc<Sockets>>) -> Self {
        let (now, remembered) = (Instant::now(), Offers::new());
        let kept = Kept { written: None, next: now };
        Self { inner, seen, remembered, grace: now + limit::RESOURCE_GRACE, kept }
    }

    /// Until the tasks stop.
    pub(super) async fn run(mut self) {
        let stopped = self.inner.changing.stopped();
        tokio::pin!(stopped);
        let mut pools = self.inner.parts.pools.follow();
        let mut changes = self.inner.parts.changes.listen();
        self.recall().await;
        loop {
            pools.iter_mut().for_each(watch::Receiver::mark_unchanged);
            let offers = self.offers();
            self.settle(&offers);
            let due = self.keep(offers).await;
            let wake = Instant::now() + limit::RELIST_PERIOD;
            let wake = [due, self.grace_end()].into_iter().flatten().fold(wake, Instant::min);
            tokio::select! {
                // What is offered is kept already, or is after the next start what it was a second ago.
                () = &mut stopped => return,
                // Whichever it was, the next turn looks at everything.
                () = any_changed(&mut pools) => {}
                () = claims_changed(&mut changes) => {}
                () = tokio::time::sleep_until(wake) => {}
            }
            tokio::select! {
                () = &mut stopped => return,
                // Claims and health change in bursts.
                () = tokio::time::sleep(limit::LIST_PACE) => {}
            }
        }
    }

    /// Learns what was offered before our restart.
    async fn recall(&mut self) {
        let path = self.inner.parts.memory.clone();
        match tokio::task::spawn_blocking(move || memory::read(&path)).await {
            Ok(Ok(offers)) => {
                self.kept.written = Some(offers.clone());
                self.remembered = offers;
            }
            Ok(Err(error)) => {
                tracing::warn!(
                    error = chain(&error),
                    "the devices of the last run are not known, drivers offer them when they serve"
                );
            }
            Err(error) => tracing::error!(%error, "the devices of the last run were not read"),
        }
    }

    fn grace_end(&self) -> Option<Instant> {
        (!self.remembered.is_empty()).then_some(self.grace)
    }

    /// What is offered now, before anybody's holding counts.
    fn offers(&mut self) -> Offers {
        if Instant::now() >= self.grace && !self.remembered.is_empty() {
            let resources: Vec<_> = self.remembered.keys().map(ToString::to_string).collect();
            tracing::warn!(
                ?resources,
                "drivers of the last run did not come back, their resources are withdrawn"
            );
            self.remembered.clear();
        }
        let mut offers = offer::offered(&self.inner.parts.pools.now(), &mut self.remembered);
        let dropped: Vec<_> = offers.keys().skip(limit::PLUGIN_RESOURCES_MAX).cloned().collect();
        dropped.iter().for_each(|resource| drop(offers.remove(resource)));
        if dropped.is_empty() {
            self.inner.parts.conditions.clear(TOO_MANY, "");
        } else {
            let (count, max) = (dropped.len(), limit::PLUGIN_RESOURCES_MAX);
            let message = format!(
                "{count} extended resources more than the {max} that are offered to a kubelet, {} first",
                dropped[0]
            );
            self.inner.parts.conditions.set("", Problem::unavailable(TOO_MANY, message));
        }
        offers
    }

    /// Brings keepers and lists in step.
    fn settle(&self, offers: &Offers) {
        let ours = self.ours();
        let mut resources = self.inner.resources();
        for (name, gone) in resources.extract_if(.., |name, _| !offers.contains_key(name)) {
            tracing::info!(resource = %name, "withdrawn from the kubelet");
            gone.tasks.stop();
        }
        for (name, offer) in offers {
            let listed = Arc::new(self.listed(offer, &ours));
            match resources.get(name) {
                Some(resource) => {
                    resource.current.send_if_modified(|current| {
                        let differs = *current != listed;
                        *current = listed;
                        differs
                    });
                }
                None => {
                    let begun = self.begin(name, listed);
                    resources.extend(begun.map(|resource| (name.clone(), resource)));
                }
            }
        }
    }

    /// Devices that the kubelet's device manager gave.
    fn ours(&self) -> BTreeSet<(DriverName, String)> {
        let held = self.inner.parts.claims.held().into_iter();
        held.flat_map(|held| held.devices.into_iter().map(move |id| (held.driver.clone(), id))).collect()
    }

    fn listed(&self, offer: &PoolOffer, ours: &BTreeSet<(DriverName, String)>) -> PoolOffer {
        let elsewhere = |id: &str| {
            if ours.contains(&(offer.driver.clone(), id.to_owned())) {
                return false;
            }
            let Some((pool, device)) = claim::split(id) else { return false };
            let holders = self.inner.parts.holders.holders(&offer.driver, pool.as_str(), device.as_str());
            // One of ours that is on its way is ours.
            !holders.is_empty() && !holders.iter().any(claim::is_plugin_claim)
        };
        PoolOffer { driver: offer.driver.clone(), devices: offer::listed(offer, elsewhere) }
    }

    fn begin(&self, name: &ExtendedResource, listed: Arc<PoolOffer>) -> Option<Resource> {
        let parts = &self.inner.parts;
        let socket = match socket::name(&self.inner.home.folder, name, parts.instance.as_ref()) {
            Ok(socket) => socket,
            Err(problem) => {
                parts.conditions.set(name.as_str(), problem);
                return None;
            }
        };
        let tasks = parts.tasks.child();
        let (current, registration) = (Arc::new(watch::Sender::new(listed)), Arc::default());
        let face = Face {
            resource: name.clone(),
            current: current.clone(),
            following: Arc::new(watch::Sender::new(0)),
            allocations: self.inner.allocations.clone(),
            counters: self.inner.home.counters.clone(),
            tasks: tasks.clone(),
        };
        let resource = Resource { current, registration: Arc::clone(&registration), tasks };
        let keeper =
            Keeper::new(self.inner.home.clone(), name.clone(), socket, face, self.seen.clone(), registration);
        parts.tasks.spawn("device-plugin", keeper.run());
        Some(resource)
    }

    /// Keeps what is offered, if it is different and the last write is not too fresh. When to come again for it.
    async fn keep(&mut self, offers: Offers) -> Option<Instant> {
        if self.kept.written.as_ref() == Some(&offers) {
            return None;
        }
        let now = Instant::now();
        if now < self.kept.next {
            return Some(self.kept.next);
        }
        let (path, to_write) = (self.inner.parts.memory.clone(), offers.clone());
        let subject = path.display().to_string();
        let written = tokio::task::spawn_blocking(move || memory::write(&path, &to_write)).await;
        let conditions = &self.inner.parts.conditions;
        let why = match written {
            Ok(Ok(())) => {
                conditions.clear(NOT_KEPT, &subject);
                self.kept = Kept { written: Some(offers), next: now + limit::BRIDGE_MEMORY_PERIOD };
                return None;
            }
            Ok(Err(error)) => chain(&error),
            Err(error) => error.to_string(),
        };
        let message = format!(
            "the devices that are offered are not kept ({why}): a restart shows the kubelet none until drivers serve"
        );
        conditions.set(&subject, Problem::unavailable(NOT_KEPT, message));
        self.kept.next = now + limit::BRIDGE_MEMORY_RETRY;
        Some(self.kept.next)
    }
}

/// Resolves when one of them is another than it was.
pub(super) fn any_changed(followed: &mut [watch::Receiver<u64>]) -> BoxFuture<'_, ()> {
    let one = |seen: &mut watch::Receiver<u64>| {
        let mut seen = seen.clone();
        async move {
            // One that ended says nothing more.
            if seen.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
        .boxed()
    };
    let all: Vec<_> = followed.iter_mut().map(one).collect();
    if all.is_empty() {
        return std::future::pending().boxed();
    }
    select_all(all).map(drop).boxed()
}

/// Resolves when a claim is another than it was, or that may have been missed.
async fn claims_changed(changes: &mut broadcast::Receiver<Changed>) {
    loop {
        match changes.recv().await {
            Ok(changed) if changed.kind == ChangedKind::Claim => return,
            Ok(_) => {}
            Err(broadcast::error::RecvError::Lagged(_)) => return,
            Err(broadcast::error::RecvError::Closed) => return std::future::pending().await,
        }
    }
}
