use super::*;

fn fixture(name: &str) -> String {
    format!("{}/../tests/fixtures/tls/{name}", env!("CARGO_MANIFEST_DIR"))
}

const WHOLE: &str = "
apiVersion: v1
kind: Config
current-context: main
contexts: [{name: main, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: 'https://127.0.0.1:6443', certificate-authority: CA}}]
users: [{name: u, user: {token: abc}}]
";

fn loaded(text: &str) -> Result<Loaded, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("kubeconfig");
    std::fs::write(dir.path().join("empty"), "").unwrap();
    std::fs::write(dir.path().join("two-lines"), "a\nb\n").unwrap();
    std::fs::write(dir.path().join("token"), " from-file\n").unwrap();
    std::fs::write(&path, text.replace("CA}", &format!("{}}}", fixture("ca.pem")))).unwrap();
    let config = ApiConfig { kubeconfig: Some(path), ..nowhere() };
    load(&config).map_err(|error| nodedock_base::error::chain(&error))
}

fn nowhere() -> ApiConfig {
    ApiConfig {
        kubeconfig: None,
        service_host: None,
        service_port: None,
        service_account: PathBuf::from("/nowhere"),
        pace: Pace::default(),
    }
}

#[test]
fn a_kubeconfig_says_where_and_who() {
    let whole = loaded(WHOLE).unwrap();
    assert_eq!(whole.server.to_string(), "https://127.0.0.1:6443/");
    assert_eq!(whole.roots.as_ref().map(Vec::len), Some(1));
    let authorization = whole.authorization.unwrap();
    assert_eq!(authorization, "Bearer abc");
    assert!(authorization.is_sensitive() && !format!("{authorization:?}").contains("abc"));
    let of = |user: &str| loaded(&WHOLE.replace("{token: abc}", user)).unwrap().authorization;
    assert_eq!(of("{tokenFile: token}").unwrap(), "Bearer from-file");
    assert_eq!(of("{token: '', tokenFile: token}").unwrap(), "Bearer from-file");
    assert_eq!(of("{username: a, password: b}").unwrap(), "Basic YTpi");
    assert_eq!(of("{}"), None);
    assert!(loaded(&WHOLE.replace(", user: u", "")).unwrap().authorization.is_none());
}

#[test]
fn what_is_wrong_in_a_kubeconfig_is_named_by_its_key() {
    let cases = [
        ("current-context: main", "current-context: other", "current-context is \"other\""),
        ("current-context: main", "", "current-context is not set"),
        ("cluster: c,", "cluster: d,", "contexts[main].context.cluster is \"d\""),
        ("user: u}", "user: v}", "contexts[main].context.user is \"v\""),
        ("server: 'https://127.0.0.1:6443',", "", "clusters[c].cluster.server is not set"),
        ("https://127.0.0.1:6443", "not a url", "clusters[c].cluster.server is \"not a url\""),
        ("https://127.0.0.1:6443", "ftp://a", "https://HOST:PORT is wanted"),
        ("https://127.0.0.1:6443", "127.0.0.1:6443", "https://HOST:PORT is wanted"),
        (
            "certificate-authority: CA",
            "certificate-authority: /none",
            "clusters[c].cluster.certificate-authority names /none",
        ),
        ("certificate-authority: CA", "certificate-authority: empty", "holds no certificate"),
        (
            "certificate-authority: CA",
            "certificate-authority-data: '%'",
            "certificate-authority-data is no base64",
        ),
        (
            "certificate-authority: CA",
            "insecure-skip-tls-verify: true",
            "clusters[c].cluster.insecure-skip-tls-verify is set",
        ),
        ("certificate-authority: CA", "proxy-url: 'http://p'", "clusters[c].cluster.proxy-url is set"),
        ("token: abc", "tokenFile: none", "users[u].user.tokenFile names"),
        ("token: abc", "tokenFile: empty", "users[u].user.tokenFile holds no token: it is empty"),
        ("token: abc", "tokenFile: two-lines", "line breaks"),
        ("token: abc", "exec: {command: x}", "users[u].user.exec is set"),
        ("token: abc", "auth-provider: {name: x}", "users[u].user.auth-provider is set"),
        ("token: abc", "token: abc, as: admin", "users[u].user.as is set"),
        ("token: abc", "client-certificate: empty", "users[u].user.client-key is not set"),
        ("token: abc", "client-key: empty", "users[u].user.client-certificate is not set"),
        (
            "token: abc",
            "client-key: empty, client-certificate: empty",
            "users[u].user.client-certificate holds no certificate",
        ),
    ];
    for (old, new, words) in cases {
        let error = loaded(&WHOLE.replace(old, new)).err().unwrap_or_else(|| panic!("{new} is taken"));
        assert!(error.contains("kubeconfig") && error.contains(words), "{new}: {error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

#[test]
fn a_kubeconfig_that_is_none_or_not_there_is_named() {
    assert!(loaded("<html>").err().unwrap().contains("is no YAML of a kubeconfig"));
    assert!(loaded("[1, 2]").err().unwrap().contains("is no YAML of a kubeconfig"));
    let config = ApiConfig { kubeconfig: Some(PathBuf::from("/nowhere/config")), ..nowhere() };
    let error = nodedock_base::error::chain(&load(&config).err().unwrap());
    assert!(error.starts_with("read the kubeconfig /nowhere/config: No such file"), "{error}");
}

#[test]
fn a_pod_has_an_address_a_token_and_a_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let config = |host: Option<&str>| ApiConfig {
        service_host: host.map(str::to_owned),
        service_port: Some("443".to_owned()),
        service_account: dir.path().to_owned(),
        kubeconfig: None,
        pace: Pace::default(),
    };
    let error = |host| load(&config(host)).err().unwrap().to_string();
    assert!(error(None).contains("KUBERNETES_SERVICE_HOST is not set"));
    assert!(error(Some("10.0.0.1")).contains("token: No such file"));
    std::fs::write(dir.path().join("token"), "abc\n").unwrap();
    assert!(error(Some("10.0.0.1")).contains("ca.crt: No such file"));
    std::fs::copy(fixture("ca.pem"), dir.path().join("ca.crt")).unwrap();
    assert!(error(Some("a b")).contains("are no address"));
    assert_eq!(load(&config(Some("10.0.0.1"))).unwrap().server.to_string(), "https://10.0.0.1:443/");
    let six = load(&config(Some("fd00::1"))).unwrap();
    assert_eq!(six.server.host(), Some("[fd00::1]"));
    assert_eq!(six.authorization.unwrap(), "Bearer abc");
}

#[test]
fn only_what_the_connection_is_made_of_changes_it() {
    let digest = |text: &str| loaded(text).unwrap().transport();
    let whole = digest(WHOLE);
    assert_eq!(whole, digest(&WHOLE.replace("token: abc", "token: other")));
    assert_ne!(whole, digest(&WHOLE.replace("6443", "6444")));
    assert_ne!(
        whole,
        digest(&WHOLE.replace(
            "certificate-authority: CA",
            &format!("certificate-authority: {}", fixture("other-ca.pem"))
        ))
    );
    let client =
        format!("client-certificate: {}, client-key: {}", fixture("client-1.pem"), fixture("client-1.key"));
    assert_ne!(whole, digest(&WHOLE.replace("token: abc", &client)));
}
