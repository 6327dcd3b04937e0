//! A loaded WASM driver: its functions as the rest of the host calls them.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use serde_json::Value;
use tokio::sync::OnceCell;

use crate::bindings::types;
use crate::calls::edits::Verifier;
use crate::calls::guest_calls::{self, CallRecording, Discovery, GuestRequest};
use crate::calls::sandbox::{GuestCall, Sandbox};
use crate::convert::{self, Refusal};
use crate::host_functions::state::Scope;
use crate::load::schema::Schemas;
use crate::{CallFailure, Containment, DriverInfo, Limit, Operation, Stats, Surface, Trigger};
use nodedock_base::clock::now_ms;
use nodedock_core::driver::values::Journal;
use nodedock_core::driver::{
    Call, ClaimDriver, DriverStats, NodeFacts, Outcomes, PreparedClaims, Published, Telemetry,
    all_failed, settle,
};
use nodedock_core::hardware_keys;
use nodedock_core::recording::{Recorder, Revision};
use nodedock_core::standard_attributes;
use nodedock_core::sysfs::blocking::blocking;
use nodedock_model::{
    DriverClaim, DriverClaimRecord, HealthReport, Inventory, LeftOut, NodeKind, ObjectRef,
    PreparedClaim, Problem, ProblemCode, ReadingsReport, Uid,
};

/// Time for which a call that only reads waits for its permits, in addition to its own time.
pub(super) const PERMIT_WAIT: Duration = Duration::from_secs(5);
/// Maximum time to check the files that container edits name: a network file system may hang.
const VERIFY_WALL: Duration = Duration::from_secs(2);
/// Maximum time to compile a schema and to check a value by it: also the largest schema takes less on a busy node.
const SCHEMA_WALL: Duration = Duration::from_secs(10);

/// A loaded WASM driver.
pub struct WasmDriver {
    pub(super) info: Arc<DriverInfo>,
    pub(super) missing_grants: Arc<[String]>,
    pub(super) config: Option<Arc<str>>,
    /// Empty until they are read.
    pub(super) schemas: Arc<OnceCell<Arc<Schemas>>>,
    pub(super) sandbox: Sandbox,
    pub(super) recorder: Recorder,
    /// Revision for recordings.
    pub(super) revision: Arc<Revision>,
}

/// Returns the extended-resource names of pools that are not granted, as lines: `extendedResources: example.com/gpu`.
pub(crate) fn missing_resources(
    inventory: &Inventory,
    is_granted: impl Fn(&str) -> bool,
) -> Vec<String> {
    let names: BTreeSet<_> = inventory
        .pools
        .values()
        .filter_map(|pool| pool.extended_resource.as_ref())
        .collect();
    let missing = names.into_iter().filter(|name| !is_granted(name.as_str()));
    missing
        .map(|name| format!("extendedResources: {name}"))
        .collect()
}

impl WasmDriver {
    pub fn info(&self) -> &DriverInfo {
        &self.info
    }

    /// Returns the capabilities that the driver requests beyond its grant, one readable line each.
    pub fn missing_grants(&self) -> &[String] {
        &self.missing_grants
    }

    /// Extended-resource names of pools beyond its grant, one readable line each. The contract has no list to request them.
    pub fn missing_resources(&self, inventory: &Inventory) -> Vec<String> {
        missing_resources(inventory, |name| {
            self.sandbox.scope.effective.allows_extended_resource(name)
        })
    }

    /// Returns the digest of the file: `sha256:` and hex.
    pub fn digest(&self) -> &str {
        &self.sandbox.compiled.digest
    }

    /// Revokes its grant, also for running calls: host functions refuse, and answers are checked against an empty grant.
    pub fn revoke(&self) {
        self.sandbox.scope.effective.revoke();
    }

    /// Returns the driver as another node with the same hardware has it: with other facts, claims and journal, and the same code, grant,
    /// limits and quarantine.
    #[must_use]
    pub fn on_node(
        &self,
        facts: NodeFacts,
        prepared_claims: Arc<dyn PreparedClaims>,
        journal: Arc<dyn Journal>,
    ) -> Self {
        Self {
            info: Arc::clone(&self.info),
            missing_grants: self.missing_grants.clone(),
            config: self.config.clone(),
            schemas: Arc::clone(&self.schemas),
            sandbox: self.sandbox.on_node(facts, prepared_claims, journal),
            recorder: Recorder::default(),
            revision: Arc::clone(&self.revision),
        }
    }

    /// Discovers the inventory, with the attributes that the host adds, then the devices' health and readings where the driver reports
    /// them. Readings that fail cost only themselves.
    pub async fn publish(&self, call: &Call, trigger: Trigger) -> Result<Published, Problem> {
        let (mut inventory, left_out) = self.discover_all(call, trigger).await?;
        let node = Arc::clone(&self.sandbox.scope.node);
        let look = self.sandbox.scope.look(move || {
            standard_attributes::add(&node.sysfs, node.numa_node_form, &mut inventory)?;
            hardware_keys::add(&node.hardware, &node.sysfs, &mut inventory)?;
            Ok(inventory)
        });
        let inventory = look.await?;
        let health = self.check_health(call).await?;
        let read = self.read_telemetry(call).await;
        Ok(Published {
            inventory,
            left_out,
            health,
            telemetry: read.map_or_else(
                |problem| Telemetry {
                    readings: ReadingsReport::new(),
                    problem: Some(problem),
                },
                |readings| Telemetry {
                    readings,
                    problem: None,
                },
            ),
        })
    }

    /// A call that only looks; its deadline includes the wait for permits.
    pub fn look_call(&self) -> Call {
        let deadline = self.sandbox.scope.limits.look_wall() + PERMIT_WAIT;
        Call {
            request_id: nodedock_base::request::new_id(),
            deadline,
        }
    }

    /// Makes an instance and drops it, without a call: what every call costs in addition to the driver's own work.
    pub async fn instantiate(&self, call: &Call) -> Result<(), Problem> {
        self.call(call, Operation::Describe, None, None, |_, _, _| {
            Box::pin(async { Ok(()) })
        })
        .await
    }

    pub fn surface(&self) -> &Surface {
        &self.sandbox.compiled.surface
    }

    /// Metrics of its calls since it was loaded.
    pub fn stats(&self) -> Arc<Stats> {
        Arc::clone(&self.sandbox.scope.counters)
    }

    /// Its quarantine.
    pub fn containment(&self) -> &Arc<Containment> {
        &self.sandbox.containment
    }

    /// Returns true if its code comes from the cache.
    pub fn from_cache(&self) -> bool {
        self.sandbox.compiled.from_cache
    }

    /// Discovers its devices on this node, with what it adds for the scheduler.
    pub async fn discover(&self, call: &Call, trigger: Trigger) -> Result<Inventory, Problem> {
        let (inventory, _) = self.discover_all(call, trigger).await?;
        Ok(inventory)
    }

    /// Discovers its devices on this node, with what it adds for the scheduler, and those that it leaves out; a driver without the facet
    /// leaves out none.
    async fn discover_all(
        &self,
        call: &Call,
        trigger: Trigger,
    ) -> Result<(Inventory, LeftOut), Problem> {
        let context = self.context(call);
        let recording = self.recording(call, || GuestRequest::Discover {
            context: context.clone(),
            trigger: trigger.clone(),
        });
        let guest = guest_calls::discover(context, trigger);
        let answer = self.call(call, Operation::Discover, None, recording, guest);
        let Discovery {
            inventory,
            additions,
            left_out,
        } = answer.await?.map_err(|problem| self.problem(problem))?;
        let driver = &self.info.name;
        let mut inventory =
            convert::inventory(driver, inventory).map_err(|why| self.refused(why))?;
        if let Some(additions) = additions {
            let added = convert::add_scheduling(driver, &mut inventory, additions);
            added.map_err(|why| self.refused(why))?;
        }
        let left_out = convert::left_out(left_out.unwrap_or_default());
        Ok((inventory, left_out.map_err(|why| self.refused(why))?))
    }

    /// Checks the health of its devices; a driver without health reports none.
    pub async fn check_health(&self, call: &Call) -> Result<HealthReport, Problem> {
        if self.sandbox.compiled.exports.health.is_none() {
            return Ok(HealthReport::new());
        }
        let context = self.context(call);
        let recording = self.recording(call, || GuestRequest::Health {
            context: context.clone(),
        });
        let answer = self.call(
            call,
            Operation::Health,
            None,
            recording,
            guest_calls::health(context),
        );
        let report = answer.await?.map_err(|problem| self.problem(problem))?;
        convert::health_report(report).map_err(|why| self.refused(why))
    }

    /// Reads what its devices measure; a driver without telemetry has no readings.
    pub async fn read_telemetry(&self, call: &Call) -> Result<ReadingsReport, Problem> {
        if self.sandbox.compiled.exports.telemetry.is_none() {
            return Ok(ReadingsReport::new());
        }
        let context = self.context(call);
        let recording = self.recording(call, || GuestRequest::Telemetry {
            context: context.clone(),
        });
        let answer = self.call(
            call,
            Operation::Telemetry,
            None,
            recording,
            guest_calls::telemetry(context),
        );
        let report = answer.await?.map_err(|problem| self.problem(problem))?;
        convert::readings_report(report).map_err(|why| self.refused(why))
    }

    /// Checks that the driver's schemas are valid, then the operator's config: it has to be JSON, match the driver's schema, and be accepted
    /// by the driver.
    pub async fn validate_config(&self, call: &Call) -> Result<(), Problem> {
        let text = self.config_text().to_owned();
        let value: Value = serde_json::from_str(&text).map_err(|error| {
            Problem::invalid(
                ProblemCode::NotJson,
                format!("the config is not JSON: {error}"),
            )
        })?;
        let schemas = self.schemas(call).await?;
        // The schema's error comes first: it names the place.
        self.check_schema(move || {
            schemas
                .config
                .as_ref()
                .map_or(Ok(()), |it| it.check(&value))
        })
        .await?;
        if self.sandbox.compiled.exports.configuration.is_none() {
            return Ok(());
        }
        let guest = guest_calls::validate_config(text);
        let verdict = self.call(call, Operation::Validate, None, None, guest);
        verdict.await?.map_err(|problem| self.problem(problem))
    }

    /// Returns the JSON Schema of claim and class parameters, if the driver has one.
    ///
    /// # Errors
    ///
    /// The driver does not return its schemas, or one of them is not valid.
    pub async fn parameters_schema(&self, call: &Call) -> Result<Option<Value>, Problem> {
        let schemas = self.schemas(call).await?;
        Ok(schemas
            .parameters
            .as_ref()
            .map(|schema| schema.document().clone()))
    }

    /// Returns the properties of the parameters in one line; `None` for a driver without their schema, or before its schemas are read.
    pub fn parameters_summary(&self) -> Option<String> {
        let schema = self.schemas.get()?.parameters.as_ref()?;
        Some(schema.summary())
    }

    /// The driver's schemas, which are read once, with nothing granted.
    async fn schemas(&self, call: &Call) -> Result<Arc<Schemas>, Problem> {
        let read = self.schemas.get_or_try_init(|| async {
            if self.sandbox.compiled.exports.configuration.is_none() {
                return Ok(Arc::default());
            }
            let sandbox = self.sandbox.with_nothing_granted();
            let guest = guest_calls::schemas();
            let texts = sandbox.call(call, Operation::Validate, None, None, guest);
            let (config, parameters) = texts.await.map_err(CallFailure::into_problem)?;
            self.check_schema(move || {
                Schemas::read(config.as_deref(), parameters.as_deref()).map(Arc::new)
            })
            .await
        });
        read.await.map(Arc::clone)
    }

    /// Compiles a schema, or checks a value by one, in one of the driver's threads.
    async fn check_schema<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let late = || {
            let message =
                format!("the check by the driver's schema did not end within {SCHEMA_WALL:?}");
            Problem::unavailable(ProblemCode::DriverBusy, message)
        };
        blocking(&self.sandbox.scope.blocking, SCHEMA_WALL, late, work).await
    }

    /// Checks one entry of parameters: by the schema, and then by the driver.
    async fn validate_entry(&self, call: &Call, parameters: &str) -> Result<(), Problem> {
        let value: Value = serde_json::from_str(parameters).map_err(|error| {
            Problem::invalid(
                ProblemCode::NotJson,
                format!("the parameters are not JSON: {error}"),
            )
        })?;
        let schemas = self.schemas(call).await?;
        self.check_schema(move || {
            let schema = schemas.parameters.as_ref();
            schema.map_or(Ok(()), |schema| schema.check(&value))
        })
        .await?;
        let guest = guest_calls::validate_parameters(parameters.to_owned());
        let verdict = self.call(call, Operation::Validate, None, None, guest);
        verdict.await?.map_err(|problem| self.problem(problem))
    }

    fn converted(
        &self,
        claims: &[DriverClaim],
        uid: &str,
        prepared: types::PreparedClaim,
    ) -> Result<PreparedClaim, Problem> {
        // `settle` drops the answer for a claim that was not requested.
        let Some(claim) = claims.iter().find(|claim| claim.id.uid.as_str() == uid) else {
            return Ok(PreparedClaim::default());
        };
        convert::prepared_claim(&self.info.name, claim, prepared).map_err(|why| self.refused(why))
    }

    /// Checks container edits against grant and node; in a thread of its own where that looks at file systems that may hang.
    async fn verified(&self, outcomes: Outcomes<PreparedClaim>) -> Outcomes<PreparedClaim> {
        let scope = Arc::clone(&self.sandbox.scope);
        if !outcomes.values().flatten().any(names_files) {
            return verify(&scope, outcomes);
        }
        let uids: Vec<_> = outcomes.keys().cloned().collect();
        let threads = &self.sandbox.scope.blocking;
        let verified = blocking(
            threads,
            VERIFY_WALL,
            || {
                let message = format!(
                    "a file that the edits name could not be looked at within {VERIFY_WALL:?}"
                );
                Problem::unavailable(ProblemCode::FileStuck, message)
            },
            move || Ok(verify(&scope, outcomes)),
        )
        .await;
        verified.unwrap_or_else(|problem| all_failed(&uids, &problem))
    }

    fn settled<'a, T>(
        &self,
        call: &Call,
        requested: impl IntoIterator<Item = &'a Uid>,
        outcomes: impl IntoIterator<Item = (String, Result<T, Problem>)>,
    ) -> Outcomes<T> {
        let (outcomes, others) = settle(requested, outcomes);
        if !others.is_empty() {
            let (driver, request, count) =
                (self.info.name.as_str(), &*call.request_id, others.len());
            tracing::warn!(
                driver,
                request,
                count,
                "driver answered for claims that were not requested"
            );
        }
        outcomes
    }

    async fn call<R: Serialize + Send + 'static>(
        &self,
        call: &Call,
        operation: Operation,
        writes_for: Option<Arc<[ObjectRef]>>,
        recording: Option<CallRecording>,
        guest: impl GuestCall<R>,
    ) -> Result<R, Problem> {
        let tap = recording.as_ref().map(CallRecording::tap);
        let answer = self
            .sandbox
            .call(call, operation, writes_for, tap, guest)
            .await;
        if let Some(recording) = recording {
            recording.end(&answer);
        }
        answer.map_err(CallFailure::into_problem)
    }

    /// Begins to record a call, if the driver is recorded.
    fn recording(
        &self,
        call: &Call,
        request: impl FnOnce() -> GuestRequest,
    ) -> Option<CallRecording> {
        self.recorder
            .is_on()
            .then(|| CallRecording::begin(&self.recorder, &self.revision, call, request()))
    }

    fn refused(&self, why: Refusal) -> Problem {
        let counters = &self.sandbox.scope.counters;
        counters.answers_refused.inc();
        why.limit()
            .into_iter()
            .for_each(|limit| counters.refuse(limit));
        why.into_problem()
    }

    /// A problem that the driver reports, within its bounds.
    fn problem(&self, problem: types::Problem) -> Problem {
        if convert::is_cut(&problem) {
            self.sandbox.scope.counters.refuse(Limit::ProblemBytes);
        }
        convert::problem_to_model(problem)
    }

    pub(super) fn config_text(&self) -> &str {
        self.config.as_deref().unwrap_or("{}")
    }

    fn context(&self, call: &Call) -> types::Context {
        let node = &self.sandbox.scope.node.facts;
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

impl fmt::Debug for WasmDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WasmDriver({}, {})", self.info.name, self.digest())
    }
}

fn verify(scope: &Scope, outcomes: Outcomes<PreparedClaim>) -> Outcomes<PreparedClaim> {
    let node = &scope.node;
    let verifier = Verifier {
        effective: &scope.effective,
        dev: &node.dev,
        files: &node.files,
        sysfs: &node.sysfs,
        hardware: &node.hardware,
    };
    let verified = outcomes.into_iter().map(|(uid, outcome)| {
        let verified = outcome.and_then(|claim| {
            verifier.claim(claim).inspect_err(|_| {
                scope.counters.answers_refused.inc();
            })
        });
        (uid, verified)
    });
    verified.collect()
}

/// Returns true if an edit names a file outside the kernel's own file systems.
fn names_files(claim: &PreparedClaim) -> bool {
    let of_devices = claim
        .devices
        .iter()
        .filter_map(|device| device.access.edits());
    of_devices.chain([&claim.edits]).any(|edits| {
        !edits.mounts.is_empty()
            || !edits.hooks.is_empty()
            || edits
                .device_nodes
                .iter()
                .any(|node| node.kind == Some(NodeKind::Block))
    })
}

#[async_trait]
impl ClaimDriver for WasmDriver {
    fn stats(&self) -> Option<DriverStats> {
        Some(DriverStats::Wasm(self.stats()))
    }

    fn is_pure(&self) -> bool {
        // Progress is for work that a crash would leave half done.
        let makes_progress = self.surface().has_import("progress");
        !makes_progress && !self.sandbox.scope.effective.can_change_node()
    }

    async fn validate_parameters(
        &self,
        call: &Call,
        parameters: &[&str],
    ) -> Vec<Result<(), Problem>> {
        if self.sandbox.compiled.exports.configuration.is_none() {
            return vec![Ok(()); parameters.len()];
        }
        let mut verdicts = Vec::with_capacity(parameters.len());
        // Each in an instance of its own: parameters of which the driver fails refuse no other claim.
        for parameters in parameters {
            verdicts.push(self.validate_entry(call, parameters).await);
        }
        verdicts
    }

    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let context = self.context(call);
        let requested: Vec<types::Claim> = claims.iter().map(convert::claim_to_guest).collect();
        let writes_for = claims.iter().map(|claim| claim.id.clone()).collect();
        let recording = self.recording(call, || GuestRequest::Prepare {
            context: context.clone(),
            claims: requested.clone(),
        });
        let guest = guest_calls::prepare(context, requested);
        let answer = self.call(call, Operation::Prepare, Some(writes_for), recording, guest);
        let answer = match answer.await {
            Ok(answer) => answer,
            Err(problem) => return all_failed(claims.iter().map(|claim| &claim.id.uid), &problem),
        };
        let outcomes = answer
            .into_iter()
            .map(|types::PrepareOutcome { uid, outcome }| {
                let outcome = match outcome {
                    Ok(prepared) => self.converted(claims, &uid, prepared),
                    Err(problem) => Err(self.problem(problem)),
                };
                (uid, outcome)
            });
        let outcomes = self.settled(call, claims.iter().map(|claim| &claim.id.uid), outcomes);
        self.verified(outcomes).await
    }

    async fn unprepare(&self, call: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        let context = self.context(call);
        let requested: Vec<types::ClaimRecord> =
            claims.iter().map(convert::claim_record_to_guest).collect();
        let writes_for = claims
            .iter()
            .map(|record| record.claim.id.clone())
            .collect();
        let recording = self.recording(call, || GuestRequest::Unprepare {
            context: context.clone(),
            claims: requested.clone(),
        });
        let guest = guest_calls::unprepare(context, requested);
        let answer = self.call(
            call,
            Operation::Unprepare,
            Some(writes_for),
            recording,
            guest,
        );
        let answer = answer.await;
        let uids = claims.iter().map(|record| &record.claim.id.uid);
        match answer {
            Ok(answer) => self.settled(
                call,
                uids,
                answer
                    .into_iter()
                    .map(|types::UnprepareOutcome { uid, outcome }| {
                        (uid, outcome.map_err(|problem| self.problem(problem)))
                    }),
            ),
            Err(problem) => all_failed(uids, &problem),
        }
    }
}
