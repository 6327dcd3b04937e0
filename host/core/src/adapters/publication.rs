//! The driver of one adapter: its name, and its devices as the registry has them.
//!
//! Is given the handle of the adapters, which says what is to be published. Owns the inventory. One task for each adapter follows the changes; that at the
//! start of the daemon registers the driver, so that its claims can be unprepared.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::adapted::KnownAdapter;
use super::claims::AdapterDriver;
use super::{AdapterParts, Adapters};
use crate::driver::{Driver, DriverIdentity, Published};
use crate::registry::names::BindError;
use crate::sysfs::blocking::blocking;
use crate::sysfs::read_stuck;
use nodedock_model::{Adapter, DriverKind, ExtendedResource, NameSource, Problem, ProblemCode};

/// Time for what the rules of an adapter read of all its devices.
const PUBLISH_WALL: Duration = Duration::from_secs(10);
const PUBLISH_RETRY: Duration = Duration::from_secs(10);

/// The owner of the driver of one adapter.
pub(super) struct Publication {
    adapters: Adapters,
    parts: Arc<AdapterParts>,
    resource: ExtendedResource,
    /// None: the driver serves without an inventory, or not at all.
    published: Option<watch::Sender<Arc<Published>>>,
}

impl Publication {
    pub(super) fn new(
        adapters: Adapters,
        parts: Arc<AdapterParts>,
        resource: ExtendedResource,
    ) -> Self {
        Self {
            adapters,
            parts,
            resource,
            published: None,
        }
    }

    pub(super) async fn run(mut self) {
        let mut freed = self.parts.registry.names.changes();
        let mut changes = self.adapters.changes();
        loop {
            freed.mark_unchanged();
            changes.mark_unchanged();
            self.adapters.expire(&self.resource);
            self.register();
            let retry = (!self.publish().await).then(|| Instant::now() + PUBLISH_RETRY);
            let next = retry
                .into_iter()
                .chain(self.adapters.expiry(&self.resource))
                .min();
            tokio::select! {
                // Whichever it was, the next round looks at everything.
                changed = changes.changed() => if changed.is_err() { return },
                changed = freed.changed() => if changed.is_err() { return },
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        }
    }

    /// Makes the adapter the driver of its name, without an inventory. Another driver may have the name.
    pub(super) fn register(&mut self) {
        let Some(known) = self.adapters.known(&self.resource) else {
            return;
        };
        let (registry, name) = (&self.parts.registry, &known.adapter.driver);
        let owner = registry.names.owner_of(name);
        if owner.is_some_and(|owner| owner != NameSource::adapter(&self.resource)) {
            // The driver is not in the registry any more.
            self.published = None;
            self.adapters.set_changed(&self.resource);
        }
        let is_registered = registry.kind(name) == Some(DriverKind::Adapter);
        if self.published.is_some() || (!known.is_refused && is_registered) {
            return;
        }
        self.serve(self.driver(&known, None));
    }

    fn driver(
        &self,
        known: &KnownAdapter,
        inventory: Option<watch::Receiver<Arc<Published>>>,
    ) -> Driver {
        let Adapter {
            resource, driver, ..
        } = &known.adapter;
        let identity =
            DriverIdentity::of_device_plugin(driver.clone(), resource, source_of(resource));
        let claims = AdapterDriver::new(
            self.adapters.clone(),
            resource.clone(),
            known.calling.clone(),
        );
        Driver {
            identity: Arc::new(identity),
            claims: Some(Arc::new(claims)),
            inventory,
        }
    }

    fn serve(&self, driver: Driver) {
        let (resource, identity) = (&self.resource, driver.identity.clone());
        let registry = &self.parts.registry;
        let refused = registry.serve_own(NameSource::adapter(resource), driver);
        let refused = refused.err().map(|why| {
            let name = &identity.name;
            format!("the adapter of {resource} does not serve under the driver name {name}: {why}")
        });
        let problem = refused
            .clone()
            .map(|why| Problem::conflict(ProblemCode::AdapterConflict, why));
        self.parts
            .conditions
            .update(ProblemCode::AdapterConflict, resource.as_str(), problem);
        registry.sources.show_own(&identity, refused.as_deref());
        self.adapters.set_refused(resource, refused);
    }

    /// Makes the name of a registered driver its own durably. False: the checkpoint takes no writes now.
    async fn bind_name(&self) -> bool {
        let resource = &self.resource;
        let known = self.adapters.known(resource);
        let Some(known) = known.filter(|known| !known.is_refused) else {
            return true;
        };
        let name = known.adapter.driver;
        let source = source_of(resource);
        match self.parts.registry.names.bind(&source, &name).await {
            Err(BindError::NotStored(problem)) => {
                // The checkpoint reports that it takes no writes.
                tracing::debug!(%resource, driver = %name, %problem, "the name of an adapter's driver is not stored yet");
                false
            }
            // A name that belongs to another source is found by the next look at it.
            Ok(()) | Err(BindError::Refused(_)) => true,
        }
    }

    /// Publishes the devices of a list, once the devices that pods have from before are known. False: `/sys` cannot be read now.
    async fn publish(&mut self) -> bool {
        if !self.bind_name().await {
            return false;
        }
        let Some((made, looks)) = self.adapters.take_changed(&self.resource) else {
            return true;
        };
        let (resource, parts) = (&self.resource, self.parts.clone());
        let publish = blocking(&looks, PUBLISH_WALL, read_stuck, move || {
            made.publish(&parts)
        });
        let published = match publish.await {
            Ok(published) => published,
            Err(problem) => {
                tracing::warn!(%resource, %problem, "the devices of an adapter are not published yet");
                self.adapters.set_changed(resource);
                return false;
            }
        };
        let devices = published
            .inventory
            .pools
            .values()
            .map(|pool| pool.devices.len())
            .sum();
        let published = Arc::new(published);
        let Some(known) = self.adapters.known(resource) else {
            return true;
        };
        if let Some(sender) = &self.published {
            sender.send_if_modified(|before| {
                let differs = *before != published;
                *before = published;
                differs
            });
        } else {
            let (sender, inventory) = watch::channel(published);
            self.published = Some(sender);
            self.serve(self.driver(&known, Some(inventory)));
        }
        let registry = &self.parts.registry;
        registry
            .sources
            .update(DriverKind::Adapter, &source_of(resource), |view| {
                view.devices = devices
            });
        registry.sources.report_devices(&known.adapter.driver);
        true
    }
}

/// The registry's source of an adapter.
pub(super) fn source_of(resource: &ExtendedResource) -> String {
    format!("device plugin {resource}")
}
