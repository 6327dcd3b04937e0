//! Names that are no extended resources and numbers that do not exist: refused wherever they come in.

use native_device_plugin::Script;
use nodedock_tests::Daemon;
use tonic::Code;

use super::agreement::agree;
use super::{NIC, limited, ready, short, with_nics};

const BAD: [&str; 8] = [
    "nic",
    "cpu",
    "kubernetes.io/nic",
    "x.kubernetes.io/nic",
    "requests.example.com/nic",
    "example.com/",
    "/nic",
    "Example.com/a nic",
];

#[tokio::test]
async fn a_pod_with_limits_that_cannot_be_is_refused_before_anything_is_done() {
    let daemon = Daemon::start().await;
    let _plugin = with_nics(&daemon, Script::ok(), 2).await;
    for (name, count) in BAD.map(|name| (name, 1)).into_iter().chain([(NIC, 0), (NIC, 4097), (NIC, u32::MAX)])
    {
        let refused = daemon.client().prepare_pod(limited("one", &[(name, count)])).await;
        let status = refused.expect_err("it is refused");
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        let says = |words: &str| status.message().contains(words);
        assert!(says(name) && says("extended_resources") && says("main"), "{status:?}");
    }
    let problem = short(&daemon, limited("one", &[(NIC, 3)])).await;
    assert_eq!((problem.kind.as_str(), problem.code.as_str()), ("unavailable", "too-few-devices"));
    assert!(problem.message.contains(NIC) && problem.message.contains("2 are available"), "{problem:?}");
    assert!(agree(&daemon).await.is_empty());
    ready(&daemon, limited("one", &[(NIC, 2)])).await;
}
