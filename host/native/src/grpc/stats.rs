//! Durations of the calls of a native plugin, by method and gRPC code, as a kubelet counts them.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tonic::{Code, Status};

use super::DraService;
use nodedock_base::metrics::{CLAIM_SECONDS, Histogram};
pub use nodedock_core::driver::stats::RpcSeconds;

/// A call of the DRA API.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Method {
    Prepare,
    Unprepare,
}

impl Method {
    /// Returns its gRPC path.
    fn path(self, service: DraService) -> &'static str {
        match (service, self) {
            (DraService::V1, Self::Prepare) => {
                "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources"
            }
            (DraService::V1, Self::Unprepare) => {
                "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources"
            }
            (DraService::V1beta1, Self::Prepare) => {
                "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources"
            }
            (DraService::V1beta1, Self::Unprepare) => {
                "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources"
            }
        }
    }
}

/// The calls of one plugin, since it registered. Bounded by the number of methods and codes.
#[derive(Debug, Default)]
pub struct Rpcs(Mutex<BTreeMap<Ended, Histogram>>);

/// Path of the method and name of the code.
type Ended = (&'static str, &'static str);

impl Rpcs {
    pub(super) fn record<T>(
        &self,
        method: Method,
        service: DraService,
        took: Duration,
        outcome: Result<T, &Status>,
    ) {
        let code = outcome.map_or_else(Status::code, |_| Code::Ok);
        let mut calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let histogram = calls.entry((method.path(service), name(code)));
        histogram.or_insert_with(|| Histogram::new(CLAIM_SECONDS)).observe_time(took);
    }

    pub fn list(&self) -> Vec<RpcSeconds> {
        let calls = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = |((method, code), seconds): (&Ended, &Histogram)| RpcSeconds {
            method,
            code,
            seconds: seconds.view(),
        };
        calls.iter().map(entry).collect()
    }
}

/// Returns the name of a code in grpc-go.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "Canceled",
        Code::Unknown => "Unknown",
        Code::InvalidArgument => "InvalidArgument",
        Code::DeadlineExceeded => "DeadlineExceeded",
        Code::NotFound => "NotFound",
        Code::AlreadyExists => "AlreadyExists",
        Code::PermissionDenied => "PermissionDenied",
        Code::ResourceExhausted => "ResourceExhausted",
        Code::FailedPrecondition => "FailedPrecondition",
        Code::Aborted => "Aborted",
        Code::OutOfRange => "OutOfRange",
        Code::Unimplemented => "Unimplemented",
        Code::Internal => "Internal",
        Code::Unavailable => "Unavailable",
        Code::DataLoss => "DataLoss",
        Code::Unauthenticated => "Unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_paths_are_those_of_the_services() {
        use nodedock_proto::kubelet::dra::{v1, v1beta1};
        for (service, name) in [
            (DraService::V1, v1::dra_plugin_server::SERVICE_NAME),
            (DraService::V1beta1, v1beta1::dra_plugin_server::SERVICE_NAME),
        ] {
            assert_eq!(Method::Prepare.path(service), format!("/{name}/NodePrepareResources"));
            assert_eq!(Method::Unprepare.path(service), format!("/{name}/NodeUnprepareResources"));
        }
    }

    #[test]
    fn calls_are_kept_by_method_and_code() {
        let rpcs = Rpcs::default();
        let late = Status::deadline_exceeded("late");
        rpcs.record(Method::Prepare, DraService::V1, Duration::from_secs(1), Ok(()));
        rpcs.record(Method::Prepare, DraService::V1, Duration::from_secs(3), Ok(()));
        rpcs.record::<()>(Method::Prepare, DraService::V1, Duration::from_secs(45), Err(&late));
        let found: Vec<_> =
            rpcs.list().into_iter().map(|rpc| (rpc.code, rpc.seconds.count(), rpc.seconds.sum)).collect();
        assert_eq!(found, [("DeadlineExceeded", 1, 45.0), ("OK", 2, 4.0)]);
    }
}
