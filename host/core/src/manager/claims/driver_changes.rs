//! Effects of driver changes: stored code that no claim needs any more, claims with devices that their driver does not have any more, and
//! claims without their driver.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

use super::gone_devices::GoneDevices;
use super::name_few;
use crate::records::RecordStore;
use crate::registry::{PublishedDevices, Registry};
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{AllocatedDevice, ChangedKind, DriverName, Problem, ProblemCode};

/// Interval of the collection of stored files without claims, unless another event triggers it.
const KEPT_SWEEP: Duration = Duration::from_secs(60);

/// A driver that is replaced is gone for a moment. Also the interval at which drivers are looked at that may be loaded yet: no change reports
/// that all files were seen.
const ABSENT_GRACE: Duration = Duration::from_secs(1);

/// A plugin whose slices others have deleted publishes them again within this time.
const UNPUBLISHED_GRACE: Duration = Duration::from_secs(10);

/// Devices, or claims, that a condition names; the message is one line.
const NAMED_MAX: usize = 8;

/// The checks that changes call for.
#[derive(Debug, Default)]
struct Checks {
    /// Drivers whose devices may not be back yet.
    drivers: BTreeSet<String>,
    /// A claim is gone, or a driver changed.
    code: bool,
    /// Devices of a driver changed, or the time for it has come.
    everything: bool,
}

/// Devices of claims that their drivers do not have, and since when, as far as no condition says so yet.
type Unpublished = BTreeMap<DriverName, Instant>;

/// Drivers of claims that are not here, with the time at which a condition says so. `None`: one does.
type Absent = BTreeMap<DriverName, Option<Instant>>;

/// The owner of the conditions about claims whose drivers or devices are gone.
pub(crate) struct DriverChanges {
    records: Arc<RecordStore>,
    registry: Registry,
    gone: GoneDevices,
    conditions: Conditions,
    changes: Changes,
    tasks: Tasks,
}

impl DriverChanges {
    pub(in crate::manager) fn new(
        records: Arc<RecordStore>,
        registry: Registry,
        gone: GoneDevices,
        conditions: Conditions,
        changes: Changes,
        tasks: Tasks,
    ) -> Self {
        Self {
            records,
            registry,
            gone,
            conditions,
            changes,
            tasks,
        }
    }

    /// Follows changes of drivers until the tasks stop.
    pub(crate) async fn follow_drivers(self: Arc<Self>) {
        let [mut drivers, mut devices] =
            [ChangedKind::Driver, ChangedKind::Device].map(|kind| self.changes.signal_of(kind));
        let mut freed = self.records.freed();
        let mut sweep = tokio::time::interval(KEPT_SWEEP);
        sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let (mut unpublished, mut absent) = (Unpublished::new(), Absent::new());
        loop {
            let recheck = unpublished
                .values()
                .min()
                .map(|since| *since + UNPUBLISHED_GRACE);
            let absent_due = absent.values().flatten().min().copied();
            let checks = tokio::select! {
                // What is left behind is found at the next start.
                () = self.tasks.stopped() => return,
                // A signal that is not seen stays.
                Ok(()) = devices.changed() => Checks { everything: true, ..Checks::default() },
                Ok(()) = drivers.changed() => Checks { code: true, ..Checks::default() },
                Ok(()) = freed.changed() => Checks { code: true, ..Checks::default() },
                // A time that has passed here has passed in the next iteration as well.
                () = sleep_until(recheck.unwrap_or_else(Instant::now)), if recheck.is_some() => Checks {
                    drivers: unpublished.keys().map(ToString::to_string).collect(),
                    ..Checks::default()
                },
                // As above.
                () = sleep_until(absent_due.unwrap_or_else(Instant::now)), if absent_due.is_some() => {
                    self.report_absent(&mut absent);
                    continue;
                }
                // The first tick is at once: the start.
                _ = sweep.tick() => Checks { everything: true, ..Checks::default() },
            };
            if checks.code || checks.everything {
                self.report_absent(&mut absent);
            }
            self.check_drivers_changed(&checks, &mut unpublished);
        }
    }

    fn check_drivers_changed(&self, checks: &Checks, unpublished: &mut Unpublished) {
        if checks.code || checks.everything || !checks.drivers.is_empty() {
            self.forget_code();
        }
        let known = self.registry.published_devices();
        for (name, published) in &known {
            let is_due = checks.everything || checks.drivers.contains(name.as_str());
            if is_due || checks.code && self.gone.is_any(name) {
                let lost = self.lost_devices(name, published);
                self.report_lost(name, published, &lost, unpublished);
            }
        }
        // The devices of a driver that does not serve are not known.
        unpublished.retain(|name, _| known.contains_key(name));
        for name in self.gone.clear_others(|name| known.contains_key(name)) {
            self.conditions
                .clear(ProblemCode::ClaimDevicesGone, name.as_str());
        }
    }

    fn report_lost(
        &self,
        name: &DriverName,
        published: &PublishedDevices,
        lost: &[(AllocatedDevice, String)],
        unpublished: &mut Unpublished,
    ) {
        if lost.is_empty() {
            unpublished.remove(name);
            if self.gone.set(name, BTreeSet::new()) {
                self.conditions
                    .clear(ProblemCode::ClaimDevicesGone, name.as_str());
            }
            return;
        }
        if matches!(published, PublishedDevices::Own(_)) && !self.gone.is_any(name) {
            let since = *unpublished.entry(name.clone()).or_insert_with(Instant::now);
            if since.elapsed() < UNPUBLISHED_GRACE {
                return;
            }
            unpublished.remove(name);
        }
        let devices = lost
            .iter()
            .map(|(device, _)| (device.pool.clone(), device.device.clone()));
        self.gone.set(name, devices.collect());
        let problem = Problem::unavailable(ProblemCode::ClaimDevicesGone, describe(name, lost));
        self.conditions.set(name.as_str(), problem);
    }

    /// Reports drivers that are not here although claims were prepared by them: those claims cannot be unprepared.
    fn report_absent(&self, absent: &mut Absent) {
        let now = Instant::now();
        let without_source = self.without_source();
        absent.retain(|driver, _| without_source.contains_key(driver));
        for (driver, claims) in &without_source {
            let due = absent
                .entry(driver.clone())
                .or_insert(Some(now + ABSENT_GRACE));
            if self.registry.is_under_way(driver) {
                *due = Some(now + ABSENT_GRACE);
            }
            if due.is_none_or(|at| at <= now) {
                *due = None;
                self.conditions
                    .set(driver.as_str(), absence(driver, claims));
            }
        }
        self.conditions
            .retain(ProblemCode::ClaimDriverGone, |subject| {
                absent.get(subject).is_some_and(Option::is_none)
            });
    }

    /// Drivers of claims that have no source yet or any more, with their claims.
    fn without_source(&self) -> BTreeMap<DriverName, Vec<String>> {
        let mut drivers = self.records.table().drivers();
        drivers.retain(|driver| self.registry.kind(driver).is_none());
        let table = self.records.table();
        let found = drivers.into_iter().filter_map(|driver| {
            let records = table
                .claims_of_driver(&driver)
                .filter(|record| record.drivers.contains_key(&driver));
            let claims: Vec<_> = records.map(|record| record.id.to_string()).collect();
            (!claims.is_empty()).then_some((driver, claims))
        });
        found.collect()
    }

    /// Removes the code of drivers that do not serve and that prepared no claim that still exists.
    pub(crate) fn forget_code(&self) {
        let Some(stored) = self.registry.instances.stored_drivers() else {
            return;
        };
        for digest in stored.idle() {
            if !self.records.table().needs_code(&digest) {
                stored.forget(&digest);
            }
        }
    }

    /// Devices of a driver's claims that it does not have, each with a claim that holds it, by the names that the driver gives.
    fn lost_devices(
        &self,
        driver: &DriverName,
        published: &PublishedDevices,
    ) -> Vec<(AllocatedDevice, String)> {
        let table = self.records.table();
        let prepared = table.claims_of_driver(driver).filter(|record| {
            let part = record.drivers.get(driver);
            part.is_some_and(|part| part.prepared.is_some())
        });
        let mut lost = Vec::new();
        for record in prepared {
            let devices = record.allocation.of_driver(driver);
            let gone = devices.filter(|device| !published.has(device));
            lost.extend(gone.map(|device| (device.clone(), record.id.to_string())));
        }
        lost.sort_by(|(a, _), (b, _)| (&a.pool, &a.device).cmp(&(&b.pool, &b.device)));
        lost
    }
}

/// The condition of claims without their driver.
fn absence(driver: &DriverName, claims: &[String]) -> Problem {
    let claims = name_few(claims.iter(), NAMED_MAX);
    let message = format!(
        "driver {driver} is not here, and claims that it prepared cannot be unprepared without it: {claims}; install it again, or release them"
    );
    Problem::unavailable(ProblemCode::ClaimDriverGone, message)
}

fn describe(driver: &DriverName, lost: &[(AllocatedDevice, String)]) -> String {
    let named = lost
        .iter()
        .map(|(of, claim)| format!("{}/{} (claim {claim})", of.pool, of.device));
    let named = name_few(named, NAMED_MAX);
    format!("claims hold devices that driver {driver} does not have any more: {named}")
}
