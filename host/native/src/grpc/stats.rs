//! Durations of the calls of a native plugin, by method and gRPC code, as a kubelet counts them.

use std::collections::BTreeMap;
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::histogram::Histogram;
use tonic::Code;

use nodedock_base::metrics::claim_seconds;
use nodedock_core::driver::stats::RpcSeconds;

/// The calls of one plugin, since it registered. Bounded by the number of methods and codes.
#[derive(Debug, Default)]
pub struct Rpcs(Mutex<BTreeMap<[String; 2], Histogram>>);

impl Rpcs {
    pub(super) fn record(&self, path: String, elapsed: Duration, code: Code) {
        // The names of grpc-go.
        let code = match code {
            Code::Ok => "OK".to_owned(),
            Code::Cancelled => "Canceled".to_owned(),
            code => format!("{code:?}"),
        };
        let mut calls = self.0.lock();
        let seconds = calls.entry([path, code]).or_insert_with(claim_seconds);
        seconds.observe(elapsed.as_secs_f64());
    }

    pub fn list(&self) -> RpcSeconds {
        let calls = self.0.lock();
        calls
            .iter()
            .map(|(labels, seconds)| (labels.clone(), seconds.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_count_by_method_and_code() {
        let rpcs = Rpcs::default();
        rpcs.record("/a/Prepare".to_owned(), Duration::from_secs(1), Code::Ok);
        rpcs.record("/a/Prepare".to_owned(), Duration::from_secs(3), Code::Ok);
        for code in [Code::DeadlineExceeded, Code::Cancelled] {
            rpcs.record("/a/Unprepare".to_owned(), Duration::ZERO, code);
        }
        let counts = rpcs
            .list()
            .into_iter()
            .map(|([method, code], seconds)| (method, code, seconds.count()));
        let expected = [
            ("/a/Prepare", "OK", 2),
            ("/a/Unprepare", "Canceled", 1),
            ("/a/Unprepare", "DeadlineExceeded", 1),
        ];
        let expected =
            expected.map(|(method, code, count)| (method.to_owned(), code.to_owned(), count));
        assert_eq!(counts.collect::<Vec<_>>(), expected);
    }
}
