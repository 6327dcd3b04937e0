//! Device plugins that are gone while pods or claims have their devices: a condition for each, until the plugin is back or its devices are free.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::Devices;
use crate::manager::claims::name_few;
use crate::records::table::ClaimTable;
use crate::resources::{ResourceSource, Resources};
use nodedock_model::{
    ChangedKind, DriverName, ExtendedResource, Problem, ProblemCode, is_plugin_driver, limit,
};

/// Time after a start in which plugins register: they notice a new daemon by its socket.
const REGISTRATION_GRACE: Duration = Duration::from_secs(30);

/// Devices that a condition names; the message is one line.
const NAMED_MAX: usize = 8;

impl Devices {
    /// Keeps the conditions about plugins that are gone, until the tasks stop.
    pub(crate) async fn report_gone_plugins(self: Arc<Self>) {
        let [mut drivers, mut devices, mut claims] =
            [ChangedKind::Driver, ChangedKind::Device, ChangedKind::Claim]
                .map(|kind| self.changes.signal_of(kind));
        let registered_by = Instant::now() + REGISTRATION_GRACE;
        loop {
            self.set_gone_conditions(registered_by);
            // Bounds the work while claims come and go.
            tokio::select! {
                () = self.tasks.stopped() => return,
                () = tokio::time::sleep(limit::EVENT_DEBOUNCE) => {}
            }
            tokio::select! {
                // The next process looks at all plugins.
                () = self.tasks.stopped() => return,
                // Safe to drop: a signal that is not seen stays.
                Ok(()) = drivers.changed() => {}
                Ok(()) = devices.changed() => {}
                Ok(()) = claims.changed() => {}
                () = sleep_until(registered_by), if Instant::now() < registered_by => {}
            }
        }
    }

    fn set_gone_conditions(&self, registered_by: Instant) {
        let has_registered = Instant::now() >= registered_by;
        let gone = gone_resources(&self.state.lock().resources, has_registered);
        let adapters = self.adapters.iter().flat_map(|adapters| adapters.list());
        let adapted: BTreeMap<_, _> = adapters
            .filter(|adapter| has_registered && !adapter.is_connected)
            .map(|adapter| (adapter.driver, adapter.resource))
            .collect();
        let mut problems = BTreeMap::new();
        if !gone.is_empty() || !adapted.is_empty() {
            let in_use = in_use(&self.records.table(), &gone, &adapted);
            problems.extend(
                in_use
                    .iter()
                    .map(|(resource, devices)| (resource.to_string(), problem(resource, devices))),
            );
        }
        self.conditions.replace(ProblemCode::PluginGone, &problems);
    }
}

/// Resources whose plugin is not connected. Until plugins `has_registered` one that is known from the checkpoint alone is not gone.
fn gone_resources(resources: &Resources, has_registered: bool) -> BTreeSet<ExtendedResource> {
    let gone = resources.iter().filter(|(_, offer)| {
        let is_of_plugin = match offer.source {
            ResourceSource::Plugin(_) => true,
            ResourceSource::Remembered => has_registered,
            ResourceSource::Pools(_) => false,
        };
        is_of_plugin && !offer.is_active()
    });
    gone.map(|(resource, _)| resource)
        .chain(resources.removed())
        .cloned()
        .collect()
}

/// Devices in use of resources whose plugin is gone, each with a pod or claim that has it. `adapted`: drivers that are made of such a plugin.
fn in_use(
    table: &ClaimTable,
    gone: &BTreeSet<ExtendedResource>,
    adapted: &BTreeMap<DriverName, ExtendedResource>,
) -> BTreeMap<ExtendedResource, Vec<String>> {
    let mut in_use = BTreeMap::<_, Vec<String>>::new();
    for claim in table.claims() {
        let prepared = claim
            .drivers
            .iter()
            .filter(|(_, part)| part.prepared.is_some());
        for (driver, _) in prepared {
            let of_plugin = claim
                .resource
                .as_ref()
                .filter(|of| is_plugin_driver(driver) && gone.contains(&of.resource));
            let (resource, devices): (_, Vec<_>) = match (of_plugin, adapted.get(driver)) {
                (Some(of), _) => (&of.resource, of.devices.keys().cloned().collect()),
                (None, Some(resource)) => {
                    let devices = claim.allocation.of_driver(driver);
                    (resource, devices.map(|of| of.device.to_string()).collect())
                }
                (None, None) => continue,
            };
            let user = match claim.pods.values().next() {
                Some(pod) => format!("pod {pod}"),
                None => format!("claim {}", claim.id),
            };
            let devices = devices.iter().map(|device| format!("{device} ({user})"));
            in_use.entry(resource.clone()).or_default().extend(devices);
        }
    }
    in_use
}

fn problem(resource: &ExtendedResource, devices: &[String]) -> Problem {
    let devices = name_few(devices.iter(), NAMED_MAX);
    let message = format!(
        "the device plugin of {resource} is gone while its devices are in use: {devices}; they stay with their pods, and no pod gets one \
         until the plugin registers again"
    );
    Problem::unavailable(ProblemCode::PluginGone, message)
}
