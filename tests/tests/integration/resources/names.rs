//! Names that are no extended resources and numbers that do not exist: refused wherever they come in.

use native_device_plugin::{Event, Options as PluginOptions, Plugin, Script};
use nodedock_proto::node::v1;
use nodedock_tests::Daemon;
use tonic::Code;

use super::agreement::agree;
use super::{
    NIC, calling, limited, nics, ready, short, until_allocatable, until_event, with_nics,
    with_registration_socket,
};

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

fn saying(options: PluginOptions, name: &str) -> PluginOptions {
    PluginOptions { said_resource: Some(name.to_owned()), ..options }
}

#[tokio::test]
async fn a_plugin_of_what_is_no_extended_resource_is_refused_by_both_ways() {
    let daemon = Daemon::start().await;
    for name in BAD {
        let refused = Plugin::start(saying(calling(&daemon, NIC), name), Script::ok(), nics(1)).await;
        let status = refused.err().expect("it is refused");
        assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
        assert!(status.message().contains(&format!("{name:?}")), "{status:?}");

        let options = saying(with_registration_socket(&daemon, NIC), name);
        let plugin = Plugin::start(options, Script::ok(), nics(1)).await.expect("the socket is made");
        let Event::Refused { why } =
            until_event(&plugin, |event| matches!(event, Event::Refused { .. })).await
        else {
            panic!("it is refused")
        };
        assert!(why.contains(&format!("{name:?}")), "{why}");
        plugin.remove_sockets().expect("remove the sockets");
    }
    let capacity = daemon.client().get_capacity(v1::GetCapacityRequest {}).await.expect("an answer");
    assert_eq!(capacity.into_inner(), v1::GetCapacityResponse::default());
    with_nics(&daemon, Script::ok(), 1).await;
}

#[tokio::test]
async fn a_registration_with_a_wrong_version_or_endpoint_is_refused_with_the_right_one() {
    let daemon = Daemon::start().await;
    let version =
        |version: &str| PluginOptions { said_version: Some(version.to_owned()), ..calling(&daemon, NIC) };
    let endpoint =
        |endpoint: &str| PluginOptions { said_endpoint: Some(endpoint.to_owned()), ..calling(&daemon, NIC) };
    for (options, words) in [
        (version("v1alpha1"), "v1beta1"),
        (endpoint("../nic.sock"), "without '/'"),
        (endpoint("missing.sock"), "does not exist"),
        (endpoint("kubelet.sock"), "on which plugins register"),
        (endpoint(""), "the name of a file"),
    ] {
        let refused = Plugin::start(options, Script::ok(), nics(1)).await.err().expect("it is refused");
        assert!(refused.message().contains(words), "{refused:?}");
    }
    with_nics(&daemon, Script::ok(), 1).await;
}

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

#[tokio::test]
async fn a_manifest_with_limits_that_cannot_be_is_refused_with_the_place() {
    let daemon = Daemon::start().await;
    let _plugin = with_nics(&daemon, Script::ok(), 2).await;
    let manifest = |limits: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: one, namespace: default, uid: pod-one}}\n\
             spec: {{containers: [{{name: main, resources: {{limits: {{{limits}}}}}}}]}}\n"
        );
        daemon.write("pod.yaml", text).to_str().expect("UTF-8").to_owned()
    };
    for name in ["requests.example.com/nic", "example.com/", "Example.com/a nic"] {
        let text = daemon.cli(&["prepare", "-f", &manifest(&format!("\"{name}\": 1"))]).await.failed(1);
        assert!(text.contains(name) && text.contains("main"), "{text}");
    }
    for count in ["-1", "0.5", "many", "1e9"] {
        let text = daemon.cli(&["prepare", "-f", &manifest(&format!("{NIC}: {count}"))]).await.failed(1);
        assert!(text.contains(NIC) && text.contains("main"), "{text}");
    }
    // Kubernetes' own are for a kubelet.
    for native in ["cpu: 1", "memory: 1Gi", "hugepages-2Mi: 1Gi", "kubernetes.io/thing: 1"] {
        let text = daemon.cli(&["prepare", "-f", &manifest(native)]).await.done();
        assert_eq!(text, "the pod has no claims\n", "{native}");
    }
    assert!(agree(&daemon).await.is_empty());
    daemon.cli(&["prepare", "-f", &manifest(&format!("{NIC}: 2, cpu: 1"))]).await.done();
}

#[tokio::test]
async fn a_pod_that_changes_its_request_keeps_what_it_has() {
    let daemon = Daemon::start().await;
    let _plugin = with_nics(&daemon, Script::ok(), 4).await;
    let answer = ready(&daemon, limited("one", &[(NIC, 2)])).await;
    for count in [1, 3] {
        let problem = short(&daemon, limited("one", &[(NIC, count)])).await;
        assert_eq!(problem.code, "request-changed", "{problem:?}");
        assert!(problem.message.contains(NIC), "{problem:?}");
    }
    assert_eq!(ready(&daemon, limited("one", &[(NIC, 2)])).await, answer);
    until_allocatable(&daemon, NIC, 4).await;
}
