//! Certificates of one run: an authority and one member, made anew each time.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use deuteron_collective::{Identity, SERVER_NAME};
use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::measure::Failure;

const AUTHORITY: &str = "authority.pem";
const MEMBER: &str = "member.pem";
const KEY: &str = "key.pem";

/// Makes both certificates and writes them, with the member's key, into the folder.
pub fn write(directory: &Path) -> Result<(), Failure> {
    let authority_key = KeyPair::generate()?;
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    fs::write(directory.join(AUTHORITY), authority.self_signed(&authority_key)?.pem())?;

    let member_key = KeyPair::generate()?;
    let mut member = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
    member.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let issuer = Issuer::new(authority, authority_key);
    fs::write(directory.join(MEMBER), member.signed_by(&member_key, &issuer)?.pem())?;
    fs::write(directory.join(KEY), member_key.serialize_pem())?;
    Ok(())
}

/// The identity as our group takes it.
pub fn ours(directory: &Path) -> Result<Identity, Failure> {
    let read = |name| fs::read(directory.join(name));
    Ok(Identity::from_pem(&read(AUTHORITY)?, &read(MEMBER)?, &read(KEY)?)?)
}

/// The two sides of bare rustls: TLS 1.3 with ring, both sides authenticated.
pub fn bare(directory: &Path) -> Result<(ClientConfig, ServerConfig), Failure> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(directory.join(AUTHORITY))?)?;
    let roots = Arc::new(roots);
    let chain = || -> Result<Vec<_>, Failure> {
        Ok(vec![CertificateDer::from_pem_file(directory.join(MEMBER))?])
    };
    let key = || PrivateKeyDer::from_pem_file(directory.join(KEY));
    let provider = Arc::new(ring::default_provider());
    let members =
        WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
    let client = ClientConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(&[&TLS13])?
        .with_root_certificates(roots)
        .with_client_auth_cert(chain()?, key()?)?;
    let server = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(members)
        .with_single_cert(chain()?, key()?)?;
    Ok((client, server))
}
