//! The version that serves: what is kept of it, what is said of it while a newer file is not taken, and its end when its grant is
//! taken back.

use std::sync::{Arc, Weak};

use super::Worker;
use crate::registry::keeper::Looker;
use crate::trust::Verdict;
use crate::{SignedFile, WasmDriver};
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::DriverIdentity;
use nodedock_core::registry::DriverState;
use nodedock_model::Problem;
use nodedock_model::grant::{self, Grant};

/// Code of the condition that a version serves and could not be kept for its claims.
pub(super) const NOT_KEPT: &str = "driver-not-kept";

pub(super) struct Serving {
    pub(super) driver: Arc<WasmDriver>,
    pub(super) verdict: Verdict,
    pub(super) looker: Looker,
    pub(super) keeper: Tasks,
}

impl Serving {
    /// That it goes on although the file, whose digest is `read`, is not taken.
    pub(super) fn goes_on(&self, read: Option<&str>, state: DriverState) -> String {
        let (version, digest, state) = (&self.driver.info().version, self.driver.digest(), state.as_str());
        let file = match read {
            None => "the new file".to_owned(),
            Some(same) if same == digest => "the same file with what stands beside it now".to_owned(),
            Some(other) => format!("the new file ({other})"),
        };
        format!("version {version} ({digest}) goes on serving; {file} is {state}")
    }
}

/// Versions that were replaced and may have calls under way.
#[derive(Default)]
pub(super) struct Drained(Vec<Weak<WasmDriver>>);

impl Drained {
    fn add(&mut self, driver: &Arc<WasmDriver>) {
        self.0.retain(|driver| driver.strong_count() > 0);
        self.0.push(Arc::downgrade(driver));
    }

    fn take_back(&self, grant: &Grant) {
        let standing = self.0.iter().filter_map(Weak::upgrade);
        standing.filter(|driver| !beyond(driver, grant).is_empty()).for_each(|driver| driver.revoke());
    }
}

/// What a driver asks for beyond a grant.
fn beyond(driver: &WasmDriver, grant: &Grant) -> Vec<String> {
    let info = driver.info();
    grant::missing(&info.capabilities, &info.limits, grant)
}

impl Worker {
    /// Keeps the code of a version for the claims that it will prepare. That it cannot be kept is no reason not to serve.
    pub(super) async fn keep(
        &self,
        identity: &Arc<DriverIdentity>,
        file: SignedFile,
        config: Option<String>,
    ) {
        let shared = &self.shared;
        match shared.predecessors.keep(identity, file, config).await {
            Ok(()) => shared.conditions.clear(NOT_KEPT, &self.source),
            Err(error) => {
                let message = format!(
                    "version {} serves, and is not kept for what it prepares: {}; `nodedock driver reload {}` tries again",
                    identity.version,
                    chain(&error),
                    self.source
                );
                shared.conditions.set(&self.source, Problem::unavailable(NOT_KEPT, message));
            }
        }
    }

    /// Ends a version that asks for what is granted no more, before anything else is done: also where no other can take over. Those
    /// that served before it may ask for more than it does.
    pub(super) fn take_back(&mut self, grant: &Grant, cause: &str) {
        self.drained.take_back(grant);
        if let Some(serving) = &self.serving {
            self.shared.predecessors.granted(&serving.driver.info().name, &self.source, grant);
        }
        let missing = self.serving.as_ref().map(|serving| beyond(&serving.driver, grant)).unwrap_or_default();
        let Some(serving) = self.serving.as_ref().filter(|_| !missing.is_empty()) else { return };
        serving.driver.revoke();
        let info = serving.driver.info();
        let reason = format!("what it asks for was taken from its grant: {}", missing.join("; "));
        let (name, version) = (info.name.clone(), info.version.clone());
        tracing::error!(driver = %name, version, reason, file = self.source, "driver stopped, its claims are kept");
        self.retire();
        self.show(|view| {
            view.state = DriverState::Blocked;
            view.devices = 0;
            view.missing_grants = missing;
            view.note("stopped", cause, 0, Some(Problem::denied("grant-revoked", &reason)));
            view.reason = reason;
        });
        self.shared.registry.tell_devices(&name);
    }

    /// Takes the version that serves out of service. Its calls in flight go on.
    pub(super) fn retire(&mut self) -> bool {
        self.shared.registry.retire(&self.source);
        let Some(serving) = self.serving.take() else { return false };
        serving.keeper.stop();
        self.shared.predecessors.left(&serving.driver.info().name, &self.source);
        self.drained(serving);
        true
    }

    /// Notes a version that serves no more.
    pub(super) fn drained(&mut self, old: Serving) {
        let name = &old.driver.info().name;
        let now = self.serving.as_ref().map(|serving| &serving.driver.info().name);
        if now.is_some_and(|now| now != name) {
            self.shared.predecessors.left(name, &self.source);
        }
        self.drained.add(&old.driver);
    }
}
