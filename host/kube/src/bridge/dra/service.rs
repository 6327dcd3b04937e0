//! The DRA API, in both versions: a kubelet's claims, prepared and unprepared by the claim manager.
//!
//! Every claim of a call has an answer of its own, with the reason where it fails; a call fails as a whole only if it names more claims
//! than are taken at once. Claims of a call are worked on side by side. What is under way is not cancelled when the caller's future is
//! dropped, or when the kubelet calls again meanwhile.

use std::sync::Arc;

use futures::StreamExt;
use nodedock_proto::kubelet::dra::{v1, v1beta1};
use tonic::{Code, Request, Response, Status};

use super::{OfferedDriver, request};
use crate::bridge::Patience;
use crate::bridge::convert::{self, Outcomes, transcode};
use crate::bridge::metrics::Method;
use nodedock_base::grpc::begin;
use nodedock_base::printable::one_line;
use nodedock_model::{KubeletDevice, ObjectRef, Problem, ProblemCode, ProblemKind};

/// Claims of one call that are processed concurrently.
const BRIDGE_CLAIMS_AT_ONCE: usize = 16;

/// Claims in one call of a kubelet: more than one pod has of a driver.
pub(crate) const BRIDGE_CLAIMS_MAX: usize = 2 * nodedock_model::limit::POD_CLAIMS_MAX;

type RpcResult<T> = Result<Response<T>, Status>;

/// A version of the API: its claims as those of `v1`, and an answer of `v1` as one of its own.
macro_rules! dra_version {
    ($version:ident, $claims:expr, $answer:expr) => {
        #[tonic::async_trait]
        impl $version::dra_plugin_server::DraPlugin for OfferedDriver {
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> RpcResult<$version::NodePrepareResourcesResponse> {
                let path = concat!(
                    "/k8s.io.kubelet.pkg.apis.dra.",
                    stringify!($version),
                    ".DRAPlugin/NodePrepareResources"
                );
                self.answer(
                    Method {
                        path,
                        is_prepare: true,
                    },
                    request,
                    |request| ($claims)(request.claims),
                    |outcomes| ($answer)(convert::prepared(outcomes)),
                )
                .await
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$version::NodeUnprepareResourcesRequest>,
            ) -> RpcResult<$version::NodeUnprepareResourcesResponse> {
                let path = concat!(
                    "/k8s.io.kubelet.pkg.apis.dra.",
                    stringify!($version),
                    ".DRAPlugin/NodeUnprepareResources"
                );
                self.answer(
                    Method {
                        path,
                        is_prepare: false,
                    },
                    request,
                    |request| ($claims)(request.claims),
                    |outcomes| ($answer)(convert::unprepared(outcomes)),
                )
                .await
            }
        }
    };
}

dra_version!(v1, Ok, Ok);
dra_version!(
    v1beta1,
    |claims: Vec<v1beta1::Claim>| claims.iter().map(transcode).collect(),
    |answer| transcode(&answer)
);

/// Shared state of the claims of a call.
struct Call {
    method: Method,
    request_id: Arc<str>,
    patience: Patience,
}

impl OfferedDriver {
    /// `claims` takes them from a request; `answer` makes an answer.
    async fn answer<In, Out>(
        &self,
        method: Method,
        request: Request<In>,
        claims: impl FnOnce(In) -> Result<Vec<v1::Claim>, Status>,
        answer: impl FnOnce(Outcomes) -> Result<Out, Status>,
    ) -> RpcResult<Out> {
        let timeout = request
            .metadata()
            .get("grpc-timeout")
            .and_then(|value| value.to_str().ok());
        let patience = request::patience(timeout, method.is_prepare);
        let call = Call {
            method,
            request_id: begin(method.path, &request),
            patience,
        };
        let outcomes = self.call(&call, claims(request.into_inner())?).await?;
        Ok(Response::new(answer(outcomes)?))
    }

    async fn call(&self, call: &Call, claims: Vec<v1::Claim>) -> Result<Outcomes, Status> {
        if claims.is_empty() {
            // A probe: no kubelet sends an empty request, and only kubelets' calls are counted.
            return Ok(Outcomes::default());
        }
        let counted = self.context.metrics.begin(&self.name, call.method);
        if claims.len() > BRIDGE_CLAIMS_MAX {
            counted.end(Code::ResourceExhausted, true);
            let count = claims.len();
            return Err(Status::resource_exhausted(format!(
                "the call names {count} claims, and at most {BRIDGE_CLAIMS_MAX} are taken at once"
            )));
        }
        let outcomes = futures::stream::iter(request::by_uid(claims)).map(|(uid, claim)| async move {
            let outcome = match claim {
                Ok(claim) => self.handle(call, &claim).await,
                Err(problem) => Err(problem),
            };
            if let Err(problem) = &outcome {
                let (driver, request, method) = (&self.name, &call.request_id, call.method.path);
                let (uid, code) = (one_line(&uid, 128), &problem.code);
                tracing::warn!(%driver, uid, %request, method, code, %problem, "the kubelet's claim failed");
            }
            (uid, outcome)
        });
        let outcomes: Outcomes = outcomes
            .buffer_unordered(BRIDGE_CLAIMS_AT_ONCE)
            .collect()
            .await;
        counted.end(
            Code::Ok,
            outcomes.iter().any(|(_, outcome)| outcome.is_err()),
        );
        Ok(outcomes)
    }

    /// One claim. If its driver does not serve but may do so soon, it is waited for, and the claim retried once. A claim that needs no
    /// driver, because it is prepared already, does not wait.
    async fn handle(&self, call: &Call, claim: &ObjectRef) -> Result<Vec<KubeletDevice>, Problem> {
        let (context, is_prepare) = (&self.context, call.method.is_prepare);
        let held = (!is_prepare)
            .then(|| context.parts.manager.kubelet.held_claim(&claim.uid))
            .flatten();
        let mut outcome = self.attempt(call, claim).await;
        if outcome
            .as_ref()
            .err()
            .is_some_and(|problem| self.waits_after(problem))
            && context.serves_within(&self.name, call.patience).await
        {
            outcome = self.attempt(call, claim).await;
        }
        // Only what the kubelet is answered is a refusal.
        match &outcome {
            Ok(_) => {}
            Err(problem) if is_prepare => {
                let (context, claim, problem) = (context.clone(), claim.clone(), problem.clone());
                let report = async move { context.report_refused_prepare(&claim, &problem).await };
                self.context
                    .parts
                    .tasks
                    .complete("kubelet-refusal", report)
                    .await;
            }
            Err(problem) => context.report_refused_unprepare(&self.name, held, problem),
        }
        outcome
    }

    /// A driver that began to serve after it was missed is called as well.
    fn waits_after(&self, problem: &Problem) -> bool {
        let was_missed = problem.code == ProblemCode::DriverUnknown
            || problem.code == ProblemCode::DriverNotServing;
        problem.kind == ProblemKind::Unavailable
            && (was_missed || self.context.may_come(&self.name))
    }

    /// Not cancelled when the caller's future is dropped: the owner of claims brings to its end what is begun with a driver.
    async fn attempt(&self, call: &Call, claim: &ObjectRef) -> Result<Vec<KubeletDevice>, Problem> {
        let request_id = call.request_id.clone();
        if call.method.is_prepare {
            return self.context.prepare(&self.name, claim, request_id).await;
        }
        self.context
            .kubelet_claims()?
            .unprepare(&self.name, claim, request_id)
            .await
            .map(|()| Vec::new())
    }
}
