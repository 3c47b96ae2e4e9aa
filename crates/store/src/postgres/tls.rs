//! Encryption, and who is trusted to be the server.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::config::Trust;
use crate::Error;

/// How connections are encrypted where the URL and the server want it.
pub(super) fn connector(trust: &Trust) -> Result<MakeRustlsConnect, Error> {
    let refused = |why: String| Error::Refused(format!("the server's certificate cannot be checked: {why}"));
    let provider = Arc::new(aws_lc_rs::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::Broken(error.to_string()))?;
    match trust {
        Trust::Anybody => Ok(MakeRustlsConnect::new(
            builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Anybody(provider)))
                .with_no_client_auth(),
        )),
        Trust::Verified(Some(file)) => {
            let unreadable =
                |error: rustls::pki_types::pem::Error| refused(format!("{}: {error}", file.display()));
            let mut roots = RootCertStore::empty();
            for certificate in CertificateDer::pem_file_iter(file).map_err(unreadable)? {
                roots.add(certificate.map_err(unreadable)?).map_err(|error| refused(error.to_string()))?;
            }
            Ok(MakeRustlsConnect::new(builder.with_root_certificates(roots).with_no_client_auth()))
        }
        Trust::Verified(None) => {
            // It builds its configuration with the process's provider; who chose one before keeps it.
            let _ = aws_lc_rs::default_provider().install_default();
            let (connector, _) = MakeRustlsConnect::with_native_certs().map_err(|_| {
                refused("the system has no root certificates: name a file with sslrootcert".to_owned())
            })?;
            Ok(connector)
        }
    }
}

/// What `sslmode=prefer` and `require` mean everywhere: nobody reads along, but nobody is asked who answers.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
