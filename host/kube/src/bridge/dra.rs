//! The DRA API, in both versions: a kubelet's claims, prepared and given up by the claim manager.
//!
//! Every claim of a call has an answer of its own, and one that fails says why in words; a call fails as a whole only if it is more
//! than is taken at once. Claims of a call are worked on side by side. A caller that goes away, or calls again meanwhile, changes
//! nothing for what is under way.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use nodedock_proto::kubelet::dra::{v1, v1beta1};
use tonic::{Code, Request, Response, Status};

use super::asked::{self, Asked};
use super::convert::{self, Outcomes};
use super::counters::{Method, Operation};
use super::offer::Offer;
use nodedock_base::grpc::begin;
use nodedock_model::limit::BRIDGE_CLAIMS_AT_ONCE;
use nodedock_model::{KubeletDevice, ObjectRef, Problem, ProblemKind};

/// The service of both versions.
#[derive(Clone)]
pub(super) struct Face(pub(super) Arc<Offer>);

type Answer<T> = Result<Response<T>, Status>;

macro_rules! dra_version {
    ($version:ident, $prepare:ident, $unprepare:ident) => {
        #[tonic::async_trait]
        impl $version::dra_plugin_server::DraPlugin for Face {
            async fn node_prepare_resources(
                &self,
                request: Request<$version::NodePrepareResourcesRequest>,
            ) -> Answer<$version::NodePrepareResourcesResponse> {
                let envelope = Envelope::of(Method::$prepare, &request);
                let asked = convert::$version::asked(request.into_inner().claims);
                Ok(Response::new(convert::$version::prepared(self.call(envelope, asked).await?)))
            }

            async fn node_unprepare_resources(
                &self,
                request: Request<$version::NodeUnprepareResourcesRequest>,
            ) -> Answer<$version::NodeUnprepareResourcesResponse> {
                let envelope = Envelope::of(Method::$unprepare, &request);
                let asked = convert::$version::asked(request.into_inner().claims);
                Ok(Response::new(convert::$version::unprepared(self.call(envelope, asked).await?)))
            }
        }
    };
}

dra_version!(v1, PrepareV1, UnprepareV1);
dra_version!(v1beta1, PrepareV1beta1, UnprepareV1beta1);

/// What goes with a call beside its claims.
struct Envelope {
    method: Method,
    request_id: Arc<str>,
    patience: Duration,
}

impl Envelope {
    fn of<T>(method: Method, request: &Request<T>) -> Self {
        let timeout = request.metadata().get("grpc-timeout").and_then(|value| value.to_str().ok());
        let patience = asked::patience(timeout);
        Self { method, request_id: begin(method.as_str(), request), patience }
    }
}

impl Face {
    async fn call(&self, envelope: Envelope, asked: Vec<Asked>) -> Result<Outcomes, Status> {
        if asked.is_empty() {
            // A probe: no kubelet asks for nothing, and what kubelets wait is counted.
            return Ok(Outcomes::default());
        }
        let offer = &self.0;
        let call = offer.ground.counters.begin(&offer.driver, envelope.method);
        let sorted = match asked::sort(asked) {
            Ok(sorted) => sorted,
            Err(too_many) => {
                call.end(Code::ResourceExhausted, true);
                return Err(Status::resource_exhausted(too_many.to_string()));
            }
        };
        let envelope = &envelope;
        let outcomes = futures::stream::iter(sorted).map(|(uid, claim)| async move {
            let outcome = match claim {
                Ok(claim) => self.settle(envelope, &claim).await,
                Err(problem) => Err(problem),
            };
            if let Err(problem) = &outcome {
                let (driver, request) = (&offer.driver, &envelope.request_id);
                let uid = nodedock_base::printable::one_line(&uid, 128);
                let method = envelope.method.as_str();
                tracing::warn!(%driver, uid, %request, method, code = problem.code, %problem, "the kubelet's claim failed");
            }
            (uid, outcome)
        });
        let outcomes: Outcomes = outcomes.buffer_unordered(BRIDGE_CLAIMS_AT_ONCE).collect().await;
        call.end(Code::Ok, outcomes.iter().any(|(_, outcome)| outcome.is_err()));
        Ok(outcomes)
    }

    /// One claim. If its driver is not there but on its way, it is waited for and the claim tried once more. A claim that needs no
    /// driver, because it is prepared already, does not wait.
    async fn settle(&self, envelope: &Envelope, claim: &ObjectRef) -> Result<Vec<KubeletDevice>, Problem> {
        let first = self.ask(envelope, claim).await;
        // A driver that came after it was missed is asked as well.
        let was_missed =
            |problem: &Problem| matches!(problem.code.as_str(), "driver-unknown" | "driver-not-serving");
        let waits = |problem: &Problem| {
            problem.kind == ProblemKind::Unavailable && (was_missed(problem) || self.0.may_come())
        };
        let last = if first.as_ref().err().is_some_and(waits) && self.0.comes_within(envelope.patience).await
        {
            self.ask(envelope, claim).await
        } else {
            first
        };
        if let (Operation::Prepare, Err(problem)) = (envelope.method.operation(), &last) {
            self.tell(claim, problem).await;
        }
        last
    }

    /// Only what the kubelet is answered is a refusal: what came before a driver did was none.
    async fn tell(&self, claim: &ObjectRef, problem: &Problem) {
        let ground = &self.0.ground;
        let (claims, claim, problem) = (ground.claims.clone(), claim.clone(), problem.clone());
        ground.tasks.complete("kubelet-refusal", async move { claims.refused(&claim, &problem).await }).await;
    }

    /// Goes on when the caller goes away: what is begun with a driver is brought to its end.
    async fn ask(&self, envelope: &Envelope, claim: &ObjectRef) -> Result<Vec<KubeletDevice>, Problem> {
        let ground = &self.0.ground;
        let (claims, driver, claim) = (ground.claims.clone(), self.0.driver.clone(), claim.clone());
        let (operation, request_id) = (envelope.method.operation(), envelope.request_id.clone());
        let work = async move {
            match operation {
                Operation::Prepare => claims.prepare(&driver, &claim, request_id).await,
                Operation::Unprepare => {
                    claims.unprepare(&driver, &claim, request_id).await.map(|()| Vec::new())
                }
            }
        };
        let outcome = ground.tasks.complete("kubelet-claim", work).await;
        outcome
            .unwrap_or_else(|| Err(Problem::internal("call-broke", "the call broke off: the log says where")))
    }
}
