//! Drivers in quarantine: their state and conditions, the notification of the end, and the operator's resume.
//!
//! The sandbox decides; a task for each serving WASM driver watches it. The end of a quarantine drops the driver's recorded refusals,
//! and callers that wait for the driver retry.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::instances::Instances;
use super::sources::{DriverState, DriverView, Sources};
use crate::driver::containment::{Containment, Quarantined};
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{DriverKind, DriverName, Problem, ProblemCode};

/// A serving WASM driver, and its conduct.
struct Conduct {
    driver: DriverName,
    containment: Arc<Containment>,
}

/// The owner of the conducts.
pub struct Quarantines {
    /// Conducts by source. Locked while a state and its condition change, so that an outdated quarantine is not shown last.
    conducts: Mutex<BTreeMap<String, Conduct>>,
    sources: Arc<Sources>,
    instances: Arc<Instances>,
    conditions: Conditions,
}

impl Quarantines {
    pub(super) fn new(
        sources: Arc<Sources>,
        instances: Arc<Instances>,
        conditions: Conditions,
    ) -> Self {
        Self {
            conducts: Mutex::default(),
            sources,
            instances,
            conditions,
        }
    }

    /// Publishes a serving driver's quarantines until `tasks` stop. Clears earlier ones of the source.
    pub fn follow(
        self: &Arc<Self>,
        source: &str,
        driver: &DriverName,
        containment: &Arc<Containment>,
        tasks: &Tasks,
    ) {
        let mut changes = containment.follow();
        let conduct = Conduct {
            driver: driver.clone(),
            containment: Arc::clone(containment),
        };
        let mut conducts = self.conducts.lock();
        let before = conducts.insert(source.to_owned(), conduct);
        self.clear(before);
        drop(conducts);
        self.settle(source);
        let (quarantines, source, stopped) = (self.clone(), source.to_owned(), tasks.stopped());
        tasks.spawn("driver-quarantine", async move {
            tokio::pin!(stopped);
            loop {
                tokio::select! {
                    // Safe to drop: the replacement of the driver has its own task.
                    () = &mut stopped => return,
                    // Safe to drop: the next iteration sees the change.
                    changed = changes.changed() => if changed.is_err() { return },
                }
                quarantines.settle(&source);
            }
        });
    }

    /// Drops the conduct of a source, if any.
    pub(super) fn forget(&self, source: &str) {
        let mut conducts = self.conducts.lock();
        self.clear(conducts.remove(source));
    }

    /// Clears the condition of a conduct. Called with the conducts locked.
    fn clear(&self, before: Option<Conduct>) {
        if let Some(before) = before {
            self.conditions
                .clear(ProblemCode::DriverQuarantined, before.driver.as_str());
        }
    }

    /// Updates the state of a source and the conditions to its driver's quarantine.
    fn settle(&self, source: &str) {
        let conducts = self.conducts.lock();
        let Some(conduct) = conducts.get(source) else {
            return;
        };
        let (driver, quarantined) = (conduct.driver.clone(), conduct.containment.quarantined());
        let settled = self.sources.change(source, |view| {
            settle(view, quarantined.as_ref())?;
            // With the source locked: it is not shown in quarantine without the condition.
            match &quarantined {
                Some(quarantined) => self.conditions.set(driver.as_str(), quarantined.problem()),
                None => self
                    .conditions
                    .clear(ProblemCode::DriverQuarantined, driver.as_str()),
            }
            Some(view.state)
        });
        let Some(state) = settled.flatten() else {
            return;
        };
        if state == DriverState::Serving {
            self.instances.renew(source);
        }
        drop(conducts);
        self.sources.report(&driver, state);
    }

    /// Ends the quarantine of a source's driver. `name`: as the operator calls it.
    pub(super) fn resume(&self, source: &str, name: &str) -> Result<DriverView, Problem> {
        let view = self.sources.view(source)?;
        if view.kind != DriverKind::Wasm {
            return Err(native(&view));
        }
        let conducts = self.conducts.lock();
        let containment = conducts
            .get(source)
            .map(|conduct| conduct.containment.clone());
        drop(conducts);
        if !containment.is_some_and(|containment| containment.resume()) {
            return Err(not_quarantined(&view));
        }
        tracing::info!(
            driver = name,
            file = source,
            "quarantine ended by an operator"
        );
        self.settle(source);
        self.sources.view(source)
    }
}

/// Changes the state of a source to its driver's quarantine. `None`: no change.
fn settle(view: &mut DriverView, quarantined: Option<&Quarantined>) -> Option<()> {
    match (quarantined, view.state) {
        (Some(quarantined), DriverState::Serving | DriverState::Quarantined) => {
            if view.state == DriverState::Serving {
                view.note(
                    "quarantined",
                    "failures in a row",
                    0,
                    Some(quarantined.problem()),
                );
            }
            view.state = DriverState::Quarantined;
            view.reason = quarantined.reason();
        }
        (None, DriverState::Quarantined) => {
            view.state = DriverState::Serving;
            view.reason = String::new();
            view.note("serving", "quarantine over", 0, None);
        }
        _ => return None,
    }
    Some(())
}

fn native(view: &DriverView) -> Problem {
    let message = format!(
        "driver {} is a native plugin, and only WASM drivers are put in quarantine: restart the plugin instead",
        view.called()
    );
    Problem::invalid(ProblemCode::DriverNative, message)
}

fn not_quarantined(view: &DriverView) -> Problem {
    let message = format!(
        "driver {} is {}: there is no quarantine to end",
        view.called(),
        view.state.as_str()
    );
    Problem::conflict(ProblemCode::DriverNotQuarantined, message)
}
