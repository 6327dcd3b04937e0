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

/// Change of a driver's quarantine.
enum Change {
    Stands(Quarantined),
    Over,
}

impl State {
    /// Updates the state of a source's quarantine. `None`: no change.
    fn settle_conduct(
        &mut self,
        source: &str,
        stored: Option<&Arc<dyn StoredDrivers>>,
    ) -> Option<(DriverName, Change)> {
        let conduct = self.conducts.get(source)?;
        let (driver, quarantined) = (conduct.driver.clone(), conduct.containment.quarantined());
        let view = self.sources.get_mut(source)?;
        let change = match (quarantined, view.state) {
            (Some(quarantined), DriverState::Serving | DriverState::Quarantined) => {
                if view.state == DriverState::Serving {
                    view.note("quarantined", "failures in a row", 0, Some(quarantined.problem()));
                }
                view.state = DriverState::Quarantined;
                view.reason = quarantined.reason();
                Change::Stands(quarantined)
            }
            (None, DriverState::Quarantined) => {
                view.state = DriverState::Serving;
                view.reason = String::new();
                view.note("serving", "quarantine over", 0, None);
                self.renew(source, stored);
                Change::Over
            }
            _ => return None,
        };
        Some((driver, change))
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
        let conduct = Conduct { driver: driver.clone(), containment: Arc::clone(containment) };
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
            self.0.conditions.clear(ProblemCode::DriverQuarantined, before.driver.as_str());
        }
    }

    fn settle_conduct(&self, source: &str) {
        let mut state = self.0.state.write();
        let Some((driver, change)) = state.settle_conduct(source, self.stored_drivers()) else { return };
        // With the state locked: otherwise an outdated quarantine could be published last.
        let now = match change {
            Change::Stands(quarantined) => {
                self.0.conditions.set(driver.as_str(), quarantined.problem());
                DriverState::Quarantined
            }
            Change::Over => {
                self.0.conditions.clear(ProblemCode::DriverQuarantined, driver.as_str());
                DriverState::Serving
            }
        };
        drop(state);
        if now == DriverState::Serving {
            self.0.serving.send_modify(|count| *count += 1);
        }
        self.0.changes.tell(ChangedKind::Driver, driver, now.as_str());
    }

    /// Ends a driver's quarantine, by driver name or file name.
    pub fn resume(&self, name: &str) -> Result<DriverView, Problem> {
        let source = self.known_source(name)?;
        let (view, containment) = {
            let state = self.0.state.read();
            let containment = state.conducts.get(&source).map(|conduct| Arc::clone(&conduct.containment));
            (state.sources.get(&source).cloned().ok_or_else(|| gone(&source))?, containment)
        };
        if view.kind == DriverKind::Grpc {
            return Err(native(&view));
        }
        if !containment.is_some_and(|containment| containment.resume()) {
            return Err(not_quarantined(&view));
        }
        tracing::info!(driver = name, file = source, "quarantine ended by an operator");
        self.settle_conduct(&source);
        self.0.state.read().sources.get(&source).cloned().ok_or_else(|| gone(&source))
    }
}

pub(super) fn gone(source: &str) -> Problem {
    Problem::not_found(ProblemCode::DriverUnknown, format!("{source} is gone"))
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
    let message =
        format!("driver {} is {}: there is no quarantine to end", called(view), view.state.as_str());
    Problem::conflict(ProblemCode::DriverNotQuarantined, message)
}
