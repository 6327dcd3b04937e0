//! A loaded driver: its functions as the rest of the host calls them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;

use super::bindings::nodedock::driver::types;
use super::cache::Kept;
use super::convert::{self, Refusal};
use super::edits::Verifier;
use super::sandbox::{CallSpec, Done, GuestCall, Sandbox};
use super::{Compiled, Containment, DriverInfo, Limit, Operation, Stats, Surface, Trigger, schema};
use nodedock_base::clock::now_ms;
use nodedock_core::driver::{Call, ClaimDriver, DriverStats, Outcomes, all_failed, settle};
use nodedock_core::sysfs::blocking::blocking;
use nodedock_model::grant::Limits;
use nodedock_model::limit::PLACE_WAIT;
use nodedock_model::{
    DeviceAccess, DriverClaim, HealthReport, Inventory, LiveClaim, ObjectRef, PreparedClaim, Problem,
};

/// Time to look at the files that edits name: a network file system may hang.
const VERIFY_WALL: Duration = Duration::from_secs(2);

/// A loaded WASM driver. Clones are the same driver.
#[derive(Clone)]
pub struct WasmDriver(Arc<Loaded>);

struct Loaded {
    sandbox: Sandbox,
    info: Arc<DriverInfo>,
    missing: Vec<String>,
    surface: Surface,
    digest: String,
    config: Option<String>,
    from_cache: bool,
    compile_duration: Duration,
    /// Keeps its code in the cache.
    _kept: Option<Kept>,
}

/// What a call is for: how long it may take, and for which claims it may write below `/sys`.
enum Purpose {
    Look(Operation),
    Act(Operation, Arc<[ObjectRef]>),
}

impl WasmDriver {
    pub(super) fn new(
        sandbox: Sandbox,
        info: DriverInfo,
        missing: Vec<String>,
        compiled: Compiled,
        config: Option<String>,
    ) -> Self {
        Self(Arc::new(Loaded {
            sandbox,
            info: Arc::new(info),
            missing,
            surface: compiled.surface,
            digest: compiled.digest,
            config,
            from_cache: compiled.from_cache,
            compile_duration: compiled.took,
            _kept: compiled.kept,
        }))
    }

    pub fn info(&self) -> &DriverInfo {
        &self.0.info
    }

    pub(super) fn shared_info(&self) -> &Arc<DriverInfo> {
        &self.0.info
    }

    /// `sha256:` and hex.
    pub fn digest(&self) -> &str {
        &self.0.digest
    }

    /// What it asks for beyond its grant, a readable line each; empty: nothing.
    pub fn missing_grants(&self) -> &[String] {
        &self.0.missing
    }

    /// Takes its grant back, from calls that are under way as well: the host does nothing more for it, and what it answers is held
    /// against an empty grant.
    pub fn revoke(&self) {
        self.0.sandbox.scope.effective.revoke();
    }

    /// Of a call that only looks, its wait for a place included.
    pub fn look_deadline(&self) -> Duration {
        self.limits().look_wall() + PLACE_WAIT
    }

    /// What its calls may take.
    pub fn limits(&self) -> Limits {
        self.0.sandbox.scope.limits
    }

    pub fn surface(&self) -> &Surface {
        &self.0.surface
    }

    pub fn has_health(&self) -> bool {
        self.0.sandbox.exports.health.is_some()
    }

    pub fn has_configuration(&self) -> bool {
        self.0.sandbox.exports.configuration.is_some()
    }

    #[cfg(test)]
    pub(super) fn sandbox(&self) -> &Sandbox {
        &self.0.sandbox
    }

    /// What its calls came to since it was loaded.
    pub fn stats(&self) -> Stats {
        self.0.sandbox.counters.snapshot()
    }

    /// Its quarantine, for those who show it and end it.
    pub fn containment(&self) -> &Arc<Containment> {
        &self.0.sandbox.containment
    }

    /// Whether it was compiled before.
    pub fn from_cache(&self) -> bool {
        self.0.from_cache
    }

    /// Time that admission and compilation, or the cache, took.
    pub fn compile_duration(&self) -> Duration {
        self.0.compile_duration
    }

    /// What it has on this node now.
    pub async fn discover(&self, call: &Call, trigger: Trigger) -> Result<Inventory, Problem> {
        let context = self.context(call);
        let trigger = convert::trigger_to_guest(trigger);
        let done = self.call(call, Purpose::Look(Operation::Discover), move |store, instance, exports| {
            Box::pin(async move {
                let discovery = exports.discovery.load(&mut *store, instance)?;
                discovery.call_discover(store, &context, &trigger).await
            })
        });
        let inventory = done.await?.answer.map_err(|problem| self.said(problem))?;
        convert::inventory(&self.info().name, inventory).map_err(|why| self.refused(why))
    }

    /// How its devices are; None: it does not tell.
    pub async fn check_health(&self, call: &Call) -> Option<Result<HealthReport, Problem>> {
        if !self.has_health() {
            return None;
        }
        Some(self.health(call).await)
    }

    async fn health(&self, call: &Call) -> Result<HealthReport, Problem> {
        let context = self.context(call);
        let done = self.call(call, Purpose::Look(Operation::Health), move |store, instance, exports| {
            Box::pin(async move {
                let Some(health) = &exports.health else { return Ok(Ok(Vec::new())) };
                health.load(&mut *store, instance)?.call_check(store, &context).await
            })
        });
        let report = done.await?.answer.map_err(|problem| self.said(problem))?;
        convert::health_report(report).map_err(|why| self.refused(why))
    }

    /// Whether the operator's config is one that the driver can work with: JSON, of its schema, and to its liking.
    pub async fn validate_config(&self, call: &Call) -> Result<(), Problem> {
        let text = self.config_text().to_owned();
        self.validate(call, "config", text, false).await
    }

    /// The same for the parameters of a claim or class.
    pub async fn validate_parameters(&self, call: &Call, parameters: String) -> Result<(), Problem> {
        self.validate(call, "parameters", parameters, true).await
    }

    async fn validate(&self, call: &Call, what: &str, text: String, parameters: bool) -> Result<(), Problem> {
        let value: Value = serde_json::from_str(&text)
            .map_err(|error| Problem::invalid("not-json", format!("the {what} is not JSON: {error}")))?;
        if !self.has_configuration() {
            return Ok(());
        }
        let done = self.call(call, Purpose::Look(Operation::Validate), move |store, instance, exports| {
            Box::pin(async move {
                let Some(configuration) = &exports.configuration else { return Ok((None, Ok(()))) };
                let configuration = configuration.load(&mut *store, instance)?;
                let schema = match parameters {
                    true => configuration.call_parameters_schema(&mut *store).await?,
                    false => configuration.call_config_schema(&mut *store).await?,
                };
                let verdict = match parameters {
                    true => configuration.call_validate_parameters(store, &text).await?,
                    false => configuration.call_validate_config(store, &text).await?,
                };
                Ok((schema, verdict))
            })
        });
        let (schema, verdict) = done.await?.answer;
        // The schema's words come first: they name the place.
        if let Some(schema) = schema {
            schema::check(what, &schema, &value)?;
        }
        verdict.map_err(|problem| self.said(problem))
    }

    async fn prepare_all(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let context = self.context(call);
        let asked: Vec<types::Claim> = claims.iter().map(convert::claim_to_guest).collect();
        let uids = || claims.iter().map(|claim| &claim.id.uid);
        let act = Purpose::Act(Operation::Prepare, claims.iter().map(|claim| claim.id.clone()).collect());
        let done = self.call(call, act, move |store, instance, exports| {
            Box::pin(async move {
                let preparation = exports.preparation.load(&mut *store, instance)?;
                preparation.call_prepare(store, &context, &asked).await
            })
        });
        let Done { answer } = match done.await {
            Ok(done) => done,
            Err(problem) => return all_failed(uids(), &problem),
        };
        let answered = answer.into_iter().map(|entry| {
            let outcome = match entry.outcome {
                Ok(prepared) => self.checked(claims, &entry.uid, prepared),
                Err(problem) => Err(self.said(problem)),
            };
            (entry.uid, outcome)
        });
        let outcomes = self.settled(call, uids(), answered);
        self.verified(outcomes).await
    }

    fn checked(
        &self,
        claims: &[DriverClaim],
        uid: &str,
        prepared: types::PreparedClaim,
    ) -> Result<PreparedClaim, Problem> {
        // `settle` drops the answer for a claim that nobody asked for.
        let Some(claim) = claims.iter().find(|claim| claim.id.uid.as_str() == uid) else {
            return Ok(PreparedClaim::default());
        };
        convert::prepared_claim(claim, prepared).map_err(|why| self.refused(why))
    }

    /// Holds the edits against grant and node; off the async threads where that looks at file systems that may hang.
    async fn verified(&self, outcomes: Outcomes<PreparedClaim>) -> Outcomes<PreparedClaim> {
        if !outcomes.values().flatten().any(needs_files) {
            return self.verify(outcomes);
        }
        let uids: Vec<_> = outcomes.keys().cloned().collect();
        let (driver, threads) = (self.clone(), &self.0.sandbox.scope.blocking);
        let stuck = || {
            let message = format!("a file that the edits name could not be looked at within {VERIFY_WALL:?}");
            Problem::unavailable("file-stuck", message)
        };
        let verified = blocking(threads, VERIFY_WALL, stuck, move || Ok(driver.verify(outcomes))).await;
        verified.unwrap_or_else(|problem| all_failed(&uids, &problem))
    }

    fn verify(&self, outcomes: Outcomes<PreparedClaim>) -> Outcomes<PreparedClaim> {
        let scope = &self.0.sandbox.scope;
        let verifier =
            Verifier { effective: &scope.effective, dev: &scope.node.dev, sysfs: &scope.node.sysfs };
        let verify = |outcome: Result<PreparedClaim, Problem>| {
            verifier.claim(outcome?).inspect_err(|_| self.0.sandbox.counters.record_refusal())
        };
        outcomes.into_iter().map(|(uid, outcome)| (uid, verify(outcome))).collect()
    }

    async fn unprepare_all(&self, call: &Call, claims: &[LiveClaim]) -> Outcomes<()> {
        let context = self.context(call);
        let asked: Vec<types::LiveClaim> = claims.iter().map(convert::live_claim_to_guest).collect();
        let uids = || claims.iter().map(|live| &live.claim.id.uid);
        let act =
            Purpose::Act(Operation::Unprepare, claims.iter().map(|live| live.claim.id.clone()).collect());
        let done = self.call(call, act, move |store, instance, exports| {
            Box::pin(async move {
                let preparation = exports.preparation.load(&mut *store, instance)?;
                preparation.call_unprepare(store, &context, &asked).await
            })
        });
        match done.await {
            Ok(Done { answer }) => {
                let outcome = |entry: types::UnprepareOutcome| {
                    (entry.uid, entry.outcome.map_err(|problem| self.said(problem)))
                };
                self.settled(call, uids(), answer.into_iter().map(outcome))
            }
            Err(problem) => all_failed(uids(), &problem),
        }
    }

    fn settled<'a, T>(
        &self,
        call: &Call,
        asked: impl IntoIterator<Item = &'a nodedock_model::Uid>,
        answered: impl IntoIterator<Item = (String, Result<T, Problem>)>,
    ) -> Outcomes<T> {
        let (outcomes, strangers) = settle(asked, answered);
        if !strangers.is_empty() {
            let driver = self.info().name.as_str();
            tracing::warn!(
                driver,
                request = &*call.request_id,
                count = strangers.len(),
                "driver answered for claims that nobody asked for"
            );
        }
        outcomes
    }

    async fn call<R: Send + 'static>(
        &self,
        call: &Call,
        purpose: Purpose,
        guest: impl GuestCall<R>,
    ) -> Result<Done<R>, Problem> {
        let limits = &self.0.sandbox.scope.limits;
        let (operation, wall, writes_for) = match purpose {
            Purpose::Look(operation) => (operation, limits.look_wall(), None),
            Purpose::Act(operation, claims) => (operation, limits.wall, Some(claims)),
        };
        let (request, deadline) = (Arc::clone(&call.request_id), call.deadline);
        let spec = CallSpec { operation, request, deadline, wall, writes_for };
        self.0.sandbox.call(spec, guest).await.map_err(super::CallFailure::into_problem)
    }

    fn refused(&self, why: Refusal) -> Problem {
        let counters = &self.0.sandbox.counters;
        counters.record_refusal();
        why.limit().into_iter().for_each(|limit| counters.refuse(limit));
        why.into_problem()
    }

    /// A problem in the driver's words, within its bounds.
    fn said(&self, problem: types::Problem) -> Problem {
        if convert::is_cut(&problem) {
            self.0.sandbox.counters.refuse(Limit::ProblemBytes);
        }
        convert::problem_to_model(problem)
    }

    fn config_text(&self) -> &str {
        self.0.config.as_deref().unwrap_or("{}")
    }

    fn context(&self, call: &Call) -> types::Context {
        let node = &self.0.sandbox.scope.node.facts;
        types::Context {
            request_id: call.request_id.to_string(),
            node_name: node.name.clone(),
            boot_id: node.boot_id.clone(),
            now_ms: now_ms(),
            config: self.config_text().to_owned(),
            facts: Vec::new(),
        }
    }
}

/// Whether an edit names a file outside the kernel's own file systems.
fn needs_files(claim: &PreparedClaim) -> bool {
    let of_devices = claim.devices.iter().filter_map(|device| match &device.access {
        DeviceAccess::Edits(edits) => Some(edits),
        DeviceAccess::CdiDevices(_) => None,
    });
    of_devices.chain([&claim.edits]).any(|edits| !edits.mounts.is_empty() || !edits.hooks.is_empty())
}

#[async_trait]
impl ClaimDriver for WasmDriver {
    fn stats(&self) -> Option<DriverStats> {
        Some(DriverStats::Wasm(Box::new(self.0.sandbox.counters.snapshot())))
    }

    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        self.prepare_all(call, claims).await
    }

    async fn unprepare(&self, call: &Call, claims: &[LiveClaim]) -> Outcomes<()> {
        self.unprepare_all(call, claims).await
    }
}
