//! Our files describe the same bytes as the kubelet's: vectors made by the official Go library, with every
//! field of every message filled, against the descriptors and against the generated Rust.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_proto::kubelet;
use prost::{DecodeError, Message, Name};
use prost_reflect::{
    DescriptorPool, DynamicMessage, FileDescriptor, MessageDescriptor, SerializeOptions,
};
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize)]
struct Api {
    package: String,
    services: Vec<Method>,
    messages: Vec<Vector>,
}

#[derive(Deserialize, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
struct Method {
    method: String,
    input: String,
    output: String,
    server_streaming: bool,
}

#[derive(Deserialize)]
struct Vector {
    message: String,
    json: Value,
    hex: String,
}

impl Vector {
    fn bytes(&self) -> Vec<u8> {
        hex::decode(&self.hex).unwrap()
    }
}

/// A generated type as what can be done with its bytes.
type Again = fn(&[u8]) -> Result<Vec<u8>, DecodeError>;
type Generated = BTreeMap<String, Again>;

fn generated<M: Message + Name + Default>() -> (String, Again) {
    (
        M::full_name(),
        |bytes| Ok(M::decode(bytes)?.encode_to_vec()),
    )
}

macro_rules! types {
    ($module:ident: $($message:ident),* $(,)?) => {
        BTreeMap::from([$(generated::<$module::$message>()),*])
    };
}

macro_rules! dra_types {
    ($module:ident) => {
        types!(
            $module: Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
            NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
            NodeUnprepareResourcesResponse,
        )
    };
}

macro_rules! dra_health_types {
    ($module:ident) => {
        types!(
            $module: DeviceHealth, DeviceIdentifier, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
        )
    };
}

/// Name of an API in the vectors, its file, and its generated types.
fn apis() -> Vec<(&'static str, &'static str, Generated)> {
    use kubelet::{device_plugin::v1beta1 as device_plugin, registration};
    use kubelet::{dra::v1 as dra_v1, dra::v1beta1 as dra_v1beta1, dra_health::v1alpha1 as health};
    use kubelet::{pod_resources::v1 as pods_v1, pod_resources::v1alpha1 as pods_v1alpha1};
    vec![
        (
            "pluginregistration-v1",
            "kubelet/pluginregistration/v1/api.proto",
            types!(registration: InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse),
        ),
        ("dra-v1", "kubelet/dra/v1/api.proto", dra_types!(dra_v1)),
        (
            "dra-v1beta1",
            "kubelet/dra/v1beta1/api.proto",
            dra_types!(dra_v1beta1),
        ),
        (
            "dra-health-v1alpha1",
            "kubelet/dra_health/v1alpha1/api.proto",
            dra_health_types!(health),
        ),
        (
            "deviceplugin-v1beta1",
            "kubelet/deviceplugin/v1beta1/api.proto",
            types!(
                device_plugin: AllocateRequest, AllocateResponse, CdiDevice, ContainerAllocateRequest,
                ContainerAllocateResponse, ContainerPreferredAllocationRequest,
                ContainerPreferredAllocationResponse, Device, DevicePluginOptions, DeviceSpec, Empty,
                ListAndWatchResponse, Mount, NumaNode, PreStartContainerRequest, PreStartContainerResponse,
                PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest, TopologyInfo,
            ),
        ),
        (
            "podresources-v1",
            "kubelet/podresources/v1/api.proto",
            types!(
                pods_v1: AllocatableResourcesRequest, AllocatableResourcesResponse, CdiDevice, ClaimResource,
                ContainerDevices, ContainerMemory, ContainerResources, DynamicResource,
                GetPodResourcesRequest, GetPodResourcesResponse, ListPodResourcesRequest,
                ListPodResourcesResponse, NumaNode, PodResources, TopologyInfo,
            ),
        ),
        (
            "podresources-v1alpha1",
            "kubelet/podresources/v1alpha1/api.proto",
            types!(
                pods_v1alpha1: ContainerDevices, ContainerResources, ListPodResourcesRequest,
                ListPodResourcesResponse, PodResources,
            ),
        ),
    ]
}

fn vectors() -> BTreeMap<String, Api> {
    serde_json::from_str(include_str!("vectors/kubelet-wire.json")).unwrap()
}

fn descriptors() -> DescriptorPool {
    DescriptorPool::decode(&include_bytes!(concat!(env!("OUT_DIR"), "/kubelet.descriptors"))[..])
        .unwrap()
}

fn file(pool: &DescriptorPool, name: &str) -> FileDescriptor {
    pool.get_file_by_name(name)
        .unwrap_or_else(|| panic!("no file {name}"))
}

fn methods(file: &FileDescriptor) -> BTreeSet<Method> {
    let services: Vec<_> = file.services().collect();
    let methods = services.iter().flat_map(|service| service.methods());
    let described = methods.map(|method| {
        assert!(!method.is_client_streaming(), "{}", method.full_name());
        Method {
            method: format!("/{}/{}", method.parent_service().full_name(), method.name()),
            input: method.input().full_name().to_owned(),
            output: method.output().full_name().to_owned(),
            server_streaming: method.is_server_streaming(),
        }
    });
    described.collect()
}

fn json(message: &DynamicMessage) -> Value {
    let options = SerializeOptions::new().use_proto_field_name(true);
    message
        .serialize_with_options(serde_json::value::Serializer, &options)
        .unwrap()
}

fn message(pool: &DescriptorPool, name: &str) -> MessageDescriptor {
    pool.get_message_by_name(name)
        .unwrap_or_else(|| panic!("no message {name}"))
}

#[test]
fn every_vector_api_is_ours() {
    let ours: BTreeSet<_> = apis().into_iter().map(|(api, ..)| api.to_owned()).collect();
    assert_eq!(ours, vectors().into_keys().collect());
}

#[test]
fn services_match_kubelet_paths_and_types() {
    let (pool, vectors) = (descriptors(), vectors());
    for (name, path, _) in apis() {
        let (file, api) = (file(&pool, path), &vectors[name]);
        assert_eq!(file.package_name(), api.package, "{name}");
        assert_eq!(
            methods(&file).iter().collect::<Vec<_>>(),
            sorted(&api.services),
            "{name}"
        );
    }
}

fn sorted(methods: &[Method]) -> Vec<&Method> {
    methods
        .iter()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}

#[test]
fn generated_servers_use_kubelet_service_names() {
    use kubelet::{device_plugin, dra, dra_health, pod_resources, registration};
    let names = [
        registration::registration_server::SERVICE_NAME,
        dra::v1::dra_plugin_server::SERVICE_NAME,
        dra::v1beta1::dra_plugin_server::SERVICE_NAME,
        dra_health::v1::dra_resource_health_server::SERVICE_NAME,
        dra_health::v1alpha1::dra_resource_health_server::SERVICE_NAME,
        device_plugin::v1beta1::registration_server::SERVICE_NAME,
        device_plugin::v1beta1::device_plugin_server::SERVICE_NAME,
        pod_resources::v1::pod_resources_lister_server::SERVICE_NAME,
        pod_resources::v1alpha1::pod_resources_lister_server::SERVICE_NAME,
    ];
    let expected = [
        "pluginregistration.Registration",
        "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin",
        "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin",
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
        "v1beta1.Registration",
        "v1beta1.DevicePlugin",
        "v1.PodResourcesLister",
        "v1alpha1.PodResourcesLister",
    ];
    assert_eq!(names, expected);
}

#[test]
fn every_message_has_a_vector() {
    let (pool, vectors) = (descriptors(), vectors());
    for (name, path, types) in apis() {
        let with_vector: BTreeSet<_> = vectors[name]
            .messages
            .iter()
            .map(|vector| vector.message.clone())
            .collect();
        let in_file: BTreeSet<_> = file(&pool, path)
            .messages()
            .map(|message| message.full_name().to_owned())
            .collect();
        assert_eq!(in_file, with_vector, "{name}");
        assert_eq!(
            types.into_keys().collect::<BTreeSet<_>>(),
            with_vector,
            "{name}"
        );
    }
}

#[test]
fn decoded_vectors_have_kubelet_values() {
    let (pool, vectors) = (descriptors(), vectors());
    for vector in vectors.values().flat_map(|api| &api.messages) {
        let decoded =
            DynamicMessage::decode(message(&pool, &vector.message), &vector.bytes()[..]).unwrap();
        assert_eq!(decoded.unknown_fields().count(), 0, "{}", vector.message);
        assert_eq!(json(&decoded), vector.json, "{}", vector.message);
    }
}

#[test]
fn generated_types_round_trip_bytes() {
    let vectors = vectors();
    for (name, _, types) in apis() {
        for vector in &vectors[name].messages {
            let again = types[&vector.message](&vector.bytes()).unwrap();
            assert_eq!(hex::encode(again), vector.hex, "{}", vector.message);
        }
    }
}

#[test]
fn cut_bytes_are_an_error() {
    let vectors = vectors();
    let mut cut = 0;
    for (name, _, types) in apis() {
        for vector in vectors[name]
            .messages
            .iter()
            .filter(|vector| !vector.hex.is_empty())
        {
            let bytes = vector.bytes();
            assert!(
                types[&vector.message](&bytes[..bytes.len() - 1]).is_err(),
                "{}",
                vector.message
            );
            cut += 1;
        }
    }
    assert!(cut > 50, "only {cut} messages were cut");
}

/// Kubernetes 1.37 made v1 of the health service from the messages of v1alpha1.
#[test]
fn health_v1_equals_v1alpha1() {
    use kubelet::dra_health::v1;
    let (pool, vectors, types) = (descriptors(), vectors(), dra_health_types!(v1));
    let alpha = &vectors["dra-health-v1alpha1"];
    for vector in &alpha.messages {
        let name = vector.message.replace("v1alpha1.", "v1.");
        let decoded = DynamicMessage::decode(message(&pool, &name), &vector.bytes()[..]).unwrap();
        assert_eq!(json(&decoded), vector.json, "{name}");
        assert_eq!(
            hex::encode(types[&name](&vector.bytes()).unwrap()),
            vector.hex,
            "{name}"
        );
    }
    let renamed = |text: &str| text.replace("v1alpha1.", "v1.");
    let expected = alpha.services.iter().map(|method| Method {
        method: renamed(&method.method),
        input: renamed(&method.input),
        output: renamed(&method.output),
        server_streaming: method.server_streaming,
    });
    assert_eq!(
        methods(&file(&pool, "kubelet/dra_health/v1/api.proto")),
        expected.collect()
    );
}

/// The vectors are of 1.36, which has no resources of pods as a whole.
#[test]
fn pod_level_resources_are_decoded() {
    use kubelet::pod_resources::v1::{ContainerMemory, PodResources};
    let bytes = hex::decode("0a0170220203072a070a016d10808020").unwrap();
    let memory = ContainerMemory {
        memory_type: "m".into(),
        size: 524_288,
        topology: None,
    };
    let pod = PodResources {
        name: "p".into(),
        cpu_ids: vec![3, 7],
        memory: vec![memory],
        ..Default::default()
    };
    assert_eq!(PodResources::decode(&bytes[..]).unwrap(), pod);
    assert_eq!(pod.encode_to_vec(), bytes);
}

/// Kubelets built with gogo/protobuf hold a nil for a map entry without a value, and once dereferenced it.
#[test]
fn empty_claim_answer_is_encoded() {
    use kubelet::dra::{v1, v1beta1};
    let entry = "0a060a0275311200";
    let claims = || {
        [(
            "u1".to_owned(),
            v1::NodeUnprepareResourceResponse::default(),
        )]
    };
    let answer = v1::NodeUnprepareResourcesResponse::from_iter(claims());
    assert_eq!(hex::encode(answer.encode_to_vec()), entry);
    assert_eq!(answer.into_claims(), BTreeMap::from(claims()));

    let claims = || {
        [(
            "u1".to_owned(),
            v1beta1::NodePrepareResourceResponse::default(),
        )]
    };
    let answer = v1beta1::NodePrepareResourcesResponse::from_iter(claims());
    assert_eq!(hex::encode(answer.encode_to_vec()), entry);
    assert_eq!(answer.into_claims(), BTreeMap::from(claims()));
}

#[test]
fn missing_claim_answer_is_empty() {
    use kubelet::dra::v1::{NodeUnprepareResourceResponse, NodeUnprepareResourcesResponse};
    let without_value = hex::decode("0a040a027531").unwrap();
    let claims = NodeUnprepareResourcesResponse::decode(&without_value[..])
        .unwrap()
        .into_claims();
    assert_eq!(
        claims,
        BTreeMap::from([("u1".into(), NodeUnprepareResourceResponse::default())])
    );

    let said = |error: &str| {
        (
            "u1".to_owned(),
            NodeUnprepareResourceResponse {
                error: error.into(),
            },
        )
    };
    let twice = NodeUnprepareResourcesResponse::from_iter([said("first"), said("second")]);
    assert_eq!(twice.into_claims(), BTreeMap::from([said("second")]));
}
