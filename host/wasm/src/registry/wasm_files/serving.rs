//! The serving version: how it is stored, how it is shown while a newer file is refused, and its end when its grant is revoked.

use std::sync::{Arc, Weak};

use tokio::sync::watch;

use super::Worker;
use crate::WasmDriver;
use crate::driver::missing_resources;
use crate::files::stored_files::SignedFile;
use crate::files::trust::TrustDecision;
use crate::registry::inventory_poller::DiscoveryRequests;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{DriverIdentity, Published};
use nodedock_core::registry::DriverState;
use nodedock_model::grant::pattern::PatternSet;
use nodedock_model::grant::{self, Grant};
use nodedock_model::{Inventory, LeftOut, NameSource, Problem, ProblemCode};

pub(super) struct Serving {
    pub(super) driver: Arc<WasmDriver>,
    /// The file or image that it was loaded from.
    pub(super) source: NameSource,
    /// Its last devices.
    pub(super) inventory: watch::Receiver<Arc<Published>>,
    pub(super) verdict: TrustDecision,
    pub(super) requests: DiscoveryRequests,
    /// Its inventory poller and what follows its calls.
    pub(super) tasks: Tasks,
}

impl Serving {
    /// Says that it still serves although the file, whose digest is `read`, was refused.
    pub(super) fn still_serves(&self, read: Option<&str>, state: DriverState) -> String {
        let (version, digest, state) = (
            &self.driver.info().version,
            self.driver.digest(),
            state.as_str(),
        );
        let file = match read {
            None => "the new file".to_owned(),
            Some(same) if same == digest => "the same file with its current side files".to_owned(),
            Some(other) => format!("the new file ({other})"),
        };
        format!("version {version} ({digest}) continues to serve; {file} is {state}")
    }
}

/// Returns the capabilities and limits that a driver requests beyond a grant.
fn beyond(driver: &WasmDriver, grant: &Grant) -> Vec<String> {
    let info = driver.info();
    grant::missing(&info.capabilities, &info.limits, grant)
}

/// Extended-resource names of pools beyond a grant.
fn resources_beyond(inventory: &Inventory, grant: &Grant) -> Vec<String> {
    let granted = PatternSet::new(&grant.unrequested.extended_resources);
    // A grant file with a glob that is none is not read at all.
    let granted = granted.unwrap_or_default();
    missing_resources(inventory, |name| granted.matches(name))
}

impl Worker {
    /// Stores the code of a version for the claims that it will prepare. A version that cannot be stored serves all the same.
    pub(super) async fn store(
        &self,
        identity: &Arc<DriverIdentity>,
        file: SignedFile,
        config: Option<String>,
    ) {
        let shared = &self.shared;
        match shared.previous_versions.store(identity, file, config).await {
            Ok(()) => shared
                .conditions
                .clear(ProblemCode::DriverNotKept, &self.source),
            Err(error) => {
                let message = format!(
                    "version {} serves, and is not stored for the claims that it prepares: {}; `nodedock driver reload {}` tries again",
                    identity.version,
                    chain(&error),
                    self.source
                );
                shared.conditions.set(
                    &self.source,
                    Problem::unavailable(ProblemCode::DriverNotKept, message),
                );
            }
        }
    }

    /// Ends a version that requests more than is granted now, before anything else, also when no other version can take over. Earlier versions
    /// may request more than it does.
    pub(super) fn revoke(&mut self, grant: &Grant, cause: &str) {
        let running = self.replaced.iter().filter_map(Weak::upgrade);
        running
            .filter(|driver| !beyond(driver, grant).is_empty())
            .for_each(|driver| driver.revoke());
        let Some(serving) = &self.serving else { return };
        self.shared
            .previous_versions
            .granted(&serving.driver.info().name, &self.source, grant);
        let mut missing = beyond(&serving.driver, grant);
        missing.extend(resources_beyond(
            &serving.inventory.borrow().inventory,
            grant,
        ));
        if missing.is_empty() {
            return;
        }
        serving.driver.revoke();
        let info = serving.driver.info();
        let reason = format!(
            "its grant no longer has what it requests: {}",
            missing.join("; ")
        );
        let (name, version) = (info.name.clone(), info.version.clone());
        tracing::error!(driver = %name, version, reason, file = self.source, "driver stopped, its claims are kept");
        self.retire();
        self.show(|view| {
            view.state = DriverState::Blocked;
            view.devices = 0;
            view.missing_grants = missing;
            view.note(
                "stopped",
                cause,
                0,
                Some(Problem::denied(ProblemCode::GrantRevoked, &reason)),
            );
            view.reason = reason;
        });
        self.shared.registry.sources.report_devices(&name);
    }

    /// Takes the serving version out of service. Its running calls continue.
    pub(super) fn retire(&mut self) -> bool {
        self.shared.registry.retire(&self.source);
        let Some(serving) = self.serving.take() else {
            return false;
        };
        serving.tasks.stop();
        // Nothing is left out by a driver that does not serve.
        self.show(|view| view.left_out = LeftOut::default());
        self.note_replaced(&serving);
        true
    }

    /// Notes a version that no longer serves.
    pub(super) fn note_replaced(&mut self, old: &Serving) {
        let name = &old.driver.info().name;
        let now = self
            .serving
            .as_ref()
            .map(|serving| &serving.driver.info().name);
        if now != Some(name) {
            self.shared.previous_versions.left(name, &self.source);
        }
        self.replaced.retain(|driver| driver.strong_count() > 0);
        self.replaced.push(Arc::downgrade(&old.driver));
    }
}
