//! A DRA plugin as a `ClaimDriver`.

use std::time::Duration;

use async_trait::async_trait;
use nodedock_proto::kubelet::dra::v1 as wire;
use nodedock_proto::prost::Message;
use serde::Serialize;
use tokio::time::{Instant, timeout_at};
use tonic::Code;

use super::stats::Rpcs;
use super::{Connection, DraService, Tap, convert, problem, rpc};
use nodedock_base::printable::one_line;
use nodedock_core::driver::{Call, ClaimDriver, DriverStats, Outcomes, all_failed, settle};
use nodedock_model::{DriverClaim, DriverClaimRecord, DriverName, PreparedClaim, Problem, Uid};

/// Time that a call waits for a lost connection: a plugin that is replaced in place takes about a second.
const RECONNECT_WAIT: Duration = Duration::from_secs(2);

/// Shared state of the calls of a native driver.
pub struct Caller {
    pub name: DriverName,
    pub connection: Connection,
    pub rpcs: Rpcs,
    pub tap: Tap,
}

/// One instance of a native driver.
pub struct DraPlugin {
    pub caller: Caller,
    pub service: DraService,
}

impl Caller {
    /// Returns the name of the driver in problems.
    pub(super) fn peer(&self) -> String {
        format!("driver {}", self.name)
    }

    /// Calls on the current connection, or after a short wait on the next one. `service`: its name in gRPC.
    pub(super) async fn call<Q, A>(
        &self,
        call: &Call,
        service: &str,
        method: &str,
        message: Q,
    ) -> Result<A, Problem>
    where
        Q: Message + Serialize + 'static,
        A: Message + Serialize + Default + 'static,
    {
        let until = Instant::now() + call.deadline;
        let channel = self
            .connection
            .channel(RECONNECT_WAIT.min(call.deadline))
            .await;
        let channel = channel.map_err(|link| problem::not_connected(&self.peer(), &link))?;
        let exchange = self.tap.begin(&call.request_id, method, &message);
        let started = Instant::now();
        let deadline = until
            .saturating_duration_since(started)
            .max(Duration::from_millis(1));
        let request = rpc::request(
            &Call {
                request_id: call.request_id.clone(),
                deadline,
            },
            message,
        );
        let path = format!("/{service}/{method}");
        let ended = timeout_at(until, rpc::unary(channel, path.clone(), request)).await;
        let code = match &ended {
            Ok(Ok(_)) => Code::Ok,
            Ok(Err(status)) => status.code(),
            Err(_) => Code::DeadlineExceeded,
        };
        if let Some(exchange) = exchange {
            exchange.ended(&ended);
        }
        self.rpcs.record(path, started.elapsed(), code);
        problem::of_call(&self.peer(), call.deadline, ended)
    }

    /// Returns one outcome for each claim; logs and drops the rest of the response.
    pub(super) fn settle<'a, T>(
        &self,
        call: &Call,
        asked: impl IntoIterator<Item = &'a Uid>,
        answered: impl IntoIterator<Item = (String, Result<T, Problem>)>,
    ) -> Outcomes<T> {
        let (outcomes, strangers) = settle(asked, answered);
        if !strangers.is_empty() {
            let (driver, request, count) = (&self.name, &call.request_id, strangers.len());
            let first = strangers.first().map(|uid| one_line(uid, 64));
            tracing::warn!(%driver, %request, count, first, "the driver answered for claims that were not requested");
        }
        outcomes
    }

    /// A kubelet does not compare a plugin's devices with the allocation, and some plugins return other devices.
    pub(super) fn note_strangers(
        &self,
        call: &Call,
        asked: &DriverClaim,
        prepared: &PreparedClaim,
    ) {
        for device in &prepared.devices {
            let (driver, claim, request) = (&self.name, &asked.id, &call.request_id);
            let (pool, name) = (&device.pool, &device.device);
            let mut allocated = asked.devices.iter();
            if !allocated.any(|a| a.pool == device.pool && a.device == device.device) {
                tracing::warn!(%driver, %claim, %request, %pool, device = %name, "the driver prepared a device that is not allocated");
            } else if device
                .requests
                .iter()
                .any(|r| !asked.devices.iter().any(|a| a.base_request() == r))
            {
                tracing::warn!(%driver, %claim, %request, %pool, device = %name, "the driver named a request that the claim does not have");
            }
        }
    }
}

impl DraPlugin {
    async fn call<Q, A>(&self, call: &Call, method: &str, message: Q) -> Result<A, Problem>
    where
        Q: Message + Serialize + 'static,
        A: Message + Serialize + Default + 'static,
    {
        let service = format!(
            "k8s.io.kubelet.pkg.apis.dra.{}.DRAPlugin",
            self.service.version()
        );
        self.caller.call(call, &service, method, message).await
    }
}

#[async_trait]
impl ClaimDriver for DraPlugin {
    fn stats(&self) -> Option<DriverStats> {
        Some(DriverStats::Grpc(self.caller.rpcs.list()))
    }

    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let asked = claims.iter().map(|claim| &claim.id.uid);
        let request = wire::NodePrepareResourcesRequest {
            claims: claims
                .iter()
                .map(|claim| convert::claim(&claim.id))
                .collect(),
        };
        let answer = match self.call(call, "NodePrepareResources", request).await {
            Ok(answer) => answer,
            Err(problem) => return all_failed(asked, &problem),
        };
        let outcomes = self.caller.settle(
            call,
            asked,
            convert::prepared(&self.caller.peer(), self.service, answer),
        );
        for claim in claims {
            if let Some(Ok(prepared)) = outcomes.get(&claim.id.uid) {
                self.caller.note_strangers(call, claim, prepared);
            }
        }
        outcomes
    }

    async fn unprepare(&self, call: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        let asked = claims.iter().map(|live| &live.claim.id.uid);
        let request = wire::NodeUnprepareResourcesRequest {
            claims: claims
                .iter()
                .map(|live| convert::claim(&live.claim.id))
                .collect(),
        };
        match self.call(call, "NodeUnprepareResources", request).await {
            Ok(answer) => self.caller.settle(
                call,
                asked,
                convert::unprepared(&self.caller.peer(), answer),
            ),
            Err(problem) => all_failed(asked, &problem),
        }
    }
}
