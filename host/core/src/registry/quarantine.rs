//! Drivers in quarantine: their state and conditions, the notification of the end, and the operator's resume.
//!
//! The sandbox decides; a task for each serving WASM driver watches it. The end of a quarantine drops the driver's recorded refusals,
//! and callers that wait for the driver retry.

use std::sync::Arc;

use super::{DriverState, DriverView, Registry, State};
use crate::driver::StoredDrivers;
use crate::driver::containment::{Containment, Quarantined};
use nodedock_base::tasks::Tasks;
use nodedock_model::{ChangedKind, DriverKind, DriverName, Problem, ProblemCode};

/// A serving WASM driver, and its conduct.
pub(super) struct Conduct {
    driver: DriverName,
    containment: Arc<Containment>,
}

impl State {
    /// Updates the state of a source to its driver's quarantine, which is returned. `None`: no change.
    fn settle_conduct(
        &mut self,
        source: &str,
        stored: Option<&Arc<dyn StoredDrivers>>,
    ) -> Option<(DriverName, Option<Quarantined>)> {
        let conduct = self.conducts.get(source)?;
        let (driver, quarantined) = (conduct.driver.clone(), conduct.containment.quarantined());
        let view = self.sources.get_mut(source)?;
        match (&quarantined, view.state) {
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
                self.renew(source, stored);
            }
            _ => return None,
        }
        Some((driver, quarantined))
    }
}

impl Registry {
    /// Publishes a serving driver's quarantines until `tasks` stop. Clears earlier ones of the source.
    pub fn follow_conduct(
        &self,
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
        let mut state = self.0.state.write();
        let before = state.conducts.insert(source.to_owned(), conduct);
        self.forget_conduct(before);
        drop(state);
        self.settle_conduct(source);
        let (registry, source, stopped) = (self.clone(), source.to_owned(), tasks.stopped());
        tasks.spawn("driver-quarantine", async move {
            tokio::pin!(stopped);
            loop {
                tokio::select! {
                    // Safe to drop: the replacement of the driver has its own task.
                    () = &mut stopped => return,
                    // Safe to drop: the next iteration sees the change.
                    changed = changes.changed() => if changed.is_err() { return },
                }
                registry.settle_conduct(&source);
            }
        });
    }

    /// Drops the recorded conduct of a source, if any. Called with the state locked, since the condition is part of it.
    pub(super) fn forget_conduct(&self, before: Option<Conduct>) {
        if let Some(before) = before {
            self.0
                .conditions
                .clear(ProblemCode::DriverQuarantined, before.driver.as_str());
        }
    }

    fn settle_conduct(&self, source: &str) {
        let mut state = self.0.state.write();
        let settled = state.settle_conduct(source, self.stored_drivers());
        let Some((driver, quarantined)) = settled else {
            return;
        };
        // With the state locked: otherwise an outdated quarantine could be published last.
        let now = match &quarantined {
            Some(quarantined) => {
                self.0
                    .conditions
                    .set(driver.as_str(), quarantined.problem());
                DriverState::Quarantined
            }
            None => {
                self.0
                    .conditions
                    .clear(ProblemCode::DriverQuarantined, driver.as_str());
                DriverState::Serving
            }
        };
        drop(state);
        if quarantined.is_none() {
            self.0.serving.send();
        }
        self.0
            .changes
            .report(ChangedKind::Driver, driver, now.as_str());
    }

    /// Ends a driver's quarantine, by driver name or file name.
    pub fn resume(&self, name: &str) -> Result<DriverView, Problem> {
        let source = self.known_source(name)?;
        let view = self.view(&source)?;
        let conduct = |state: &State| Some(Arc::clone(&state.conducts.get(&source)?.containment));
        let containment = conduct(&self.0.state.read());
        if view.kind != DriverKind::Wasm {
            return Err(native(&view));
        }
        if !containment.is_some_and(|containment| containment.resume()) {
            return Err(not_quarantined(&view));
        }
        tracing::info!(
            driver = name,
            file = source,
            "quarantine ended by an operator"
        );
        self.settle_conduct(&source);
        self.view(&source)
    }
}

fn called(view: &DriverView) -> &str {
    view.name.as_ref().map_or(&view.source, DriverName::as_str)
}

fn native(view: &DriverView) -> Problem {
    let message = format!(
        "driver {} is a native plugin, and only WASM drivers are put in quarantine: restart the plugin instead",
        called(view)
    );
    Problem::invalid(ProblemCode::DriverNative, message)
}

fn not_quarantined(view: &DriverView) -> Problem {
    let message = format!(
        "driver {} is {}: there is no quarantine to end",
        called(view),
        view.state.as_str()
    );
    Problem::conflict(ProblemCode::DriverNotQuarantined, message)
}
