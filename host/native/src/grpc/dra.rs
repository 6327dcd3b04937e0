//! A DRA plugin as a `ClaimDriver`.

use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use tonic::Status;
use tonic::transport::Channel;

use super::rpc::{self, Answers, Envelope};
use super::stats::Rpcs;
use super::{Connection, DraService, convert, problem};
use nodedock_core::driver::{Call, ClaimDriver, DriverStats, Outcomes, all_failed, settle};
use nodedock_model::{DriverClaim, DriverName, LiveClaim, ObjectRef, PreparedClaim, Problem, Uid, limit};

/// One instance of a native driver.
pub struct DraPlugin {
    pub name: DriverName,
    pub service: DraService,
    pub connection: Connection,
    pub rpcs: Rpcs,
}

impl DraPlugin {
    /// Calls on the current connection, or after a short wait on the next one.
    async fn call<F>(
        &self,
        call: &Call,
        method: &str,
        work: impl FnOnce(Channel, Envelope) -> F,
    ) -> Result<Answers, Problem>
    where
        F: Future<Output = Result<Answers, Status>>,
    {
        let until = tokio::time::Instant::now() + call.deadline;
        let channel = self.connection.channel(limit::RECONNECT_WAIT.min(call.deadline)).await;
        let channel = channel.map_err(|link| problem::not_connected(&self.name, &link))?;
        let left = until.saturating_duration_since(tokio::time::Instant::now()).max(Duration::from_millis(1));
        let envelope = Envelope { request_id: call.request_id.clone(), deadline: left };
        let started = tokio::time::Instant::now();
        let ended = tokio::time::timeout_at(until, work(channel, envelope)).await;
        let outcome = ended.map_err(|_| Status::deadline_exceeded("our own deadline"));
        let seen = outcome.as_ref().and_then(Result::as_ref);
        self.rpcs.record(self.service, method, started.elapsed(), seen);
        match outcome {
            Err(_) => Err(problem::no_answer(&self.name, call.deadline)),
            Ok(Err(status)) => Err(problem::of_status(&self.name, &status)),
            Ok(Ok(answers)) => Ok(answers),
        }
    }

    /// Returns one outcome for each claim; logs and drops the rest of the response.
    fn settle<'a, T>(
        &self,
        call: &Call,
        asked: impl IntoIterator<Item = &'a Uid>,
        answered: impl IntoIterator<Item = (String, Result<T, Problem>)>,
    ) -> Outcomes<T> {
        let (outcomes, strangers) = settle(asked, answered);
        if !strangers.is_empty() {
            let (driver, request, count) = (&self.name, &call.request_id, strangers.len());
            let first = strangers.first().map(|uid| super::cut(uid, 64));
            tracing::warn!(%driver, %request, count, ?first, "the driver answered for claims that were not requested");
        }
        outcomes
    }

    /// A kubelet does not compare a plugin's devices with the allocation, and some plugins return other devices.
    fn note_strangers(&self, call: &Call, asked: &DriverClaim, prepared: &PreparedClaim) {
        for device in &prepared.devices {
            let allocated =
                |a: &&nodedock_model::AllocatedDevice| a.pool == device.pool && a.device == device.device;
            let (driver, claim, request) = (&self.name, &asked.id, &call.request_id);
            let (pool, name) = (&device.pool, &device.device);
            if !asked.devices.iter().any(|a| allocated(&a)) {
                tracing::warn!(%driver, %claim, %request, %pool, device = %name, "the driver prepared a device that is not allocated");
            } else if device.requests.iter().any(|r| !asked.devices.iter().any(|a| a.base_request() == r)) {
                tracing::warn!(%driver, %claim, %request, %pool, device = %name, "the driver named a request that the claim does not have");
            }
        }
    }
}

#[async_trait]
impl ClaimDriver for DraPlugin {
    fn stats(&self) -> Option<DriverStats> {
        Some(DriverStats::Grpc(self.rpcs.list()))
    }

    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let asked = || claims.iter().map(|claim| &claim.id.uid);
        let ids: Vec<&ObjectRef> = claims.iter().map(|claim| &claim.id).collect();
        let work = |channel, envelope| {
            let (ids, service) = (&ids, self.service);
            async move { rpc::prepare(channel, service, &envelope, ids).await }
        };
        let answers = match self.call(call, "NodePrepareResources", work).await {
            Ok(answers) => answers,
            Err(problem) => return all_failed(asked(), &problem),
        };
        let answered =
            answers.into_iter().map(|(uid, answer)| (uid, convert::prepared_claim(&self.name, answer)));
        let outcomes = self.settle(call, asked(), answered);
        for claim in claims {
            if let Some(Ok(prepared)) = outcomes.get(&claim.id.uid) {
                self.note_strangers(call, claim, prepared);
            }
        }
        outcomes
    }

    async fn unprepare(&self, call: &Call, claims: &[LiveClaim]) -> Outcomes<()> {
        let asked = || claims.iter().map(|live| &live.claim.id.uid);
        let ids: Vec<&ObjectRef> = claims.iter().map(|live| &live.claim.id).collect();
        let work = |channel, envelope| {
            let (ids, service) = (&ids, self.service);
            async move { rpc::unprepare(channel, service, &envelope, ids).await }
        };
        match self.call(call, "NodeUnprepareResources", work).await {
            Ok(answers) => {
                let answered =
                    answers.into_iter().map(|(uid, answer)| (uid, convert::unprepared(&self.name, &answer)));
                self.settle(call, asked(), answered)
            }
            Err(problem) => all_failed(asked(), &problem),
        }
    }
}
