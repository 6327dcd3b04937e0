//! The typed clients of the official library, which send protobuf.

use nodedock_tests::machine::or_skip;

use super::Machine;
use crate::{lines, programs};

#[tokio::test]
async fn typed_clients_handle_every_kind() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let Some(program) = or_skip("typed clients of client-go", programs::go("typed-client")) else {
        return;
    };
    let kubeconfig = machine.kubeconfig();
    let kubeconfig = kubeconfig.to_str().expect("the root has a name in UTF-8");
    let kinds = [
        "DeviceClass",
        "ResourceClaim",
        "ResourceClaimTemplate",
        "ResourceSlice",
        "Pod",
        "Node",
        "Namespace",
        "Event",
        "Event.events.k8s.io",
    ];
    assert_eq!(lines(&program, &["--kubeconfig", kubeconfig]).await, kinds);
}
